"""The trace that comes with the package."""

from __future__ import annotations

from pathlib import Path


def sample_path() -> Path:
    """A small synthetic trace in Azure's schema, statistically like its conversation trace of 2023
    (see traces/data/README.md). No row of it was ever observed."""
    return Path(__file__).parent / "data" / "synthetic_azure_conv.csv"
