"""The scheduler against recorded schedules of vLLM: `python -m tests.conformance CASE.json`."""
