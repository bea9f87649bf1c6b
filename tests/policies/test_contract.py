"""The contract of a policy, checked on every registered one and on twins that misbehave legally.

Whatever a policy decides: every request is accounted for once, no token or block is lost, time
goes forward, the run ends, the same seed gives the same run, and nothing is known too early.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim import Result, Scenario, Simulation
from sim.registry import POLICIES
from sim.request import Trace
from tests.checks import check_conservation

TWINS = "tests.policies.twins"
EXTRA = {
    "scheduling": [f"{TWINS}:StarveLast", f"{TWINS}:NewestFirst"],
    "eviction": [f"{TWINS}:MostRecent"],
    "admission": [f"{TWINS}:RejectAll", f"{TWINS}:DeferAll", f"{TWINS}:OneByOne"],
    "routing": [f"{TWINS}:AlwaysFirst", f"{TWINS}:Random"],
}
ALL = [(kind, name) for kind, table in POLICIES.items() for name in [*table, *EXTRA[kind]]]
FIELD = {"scheduling": "policy"}
ENDS_SOME = {f"{TWINS}:RejectAll", f"{TWINS}:DeferAll", "queue-limit"}
"""Policies that need not complete every request."""


def workload(n: int = 150, seed: int = 3) -> Trace:
    """Bursty, with shared prompts, priorities, and more KV demand than there is memory."""
    from sim.request import Segment, prompt_key

    rng = np.random.default_rng(seed)
    prompt = rng.integers(5, 300, n)
    segments = []
    for i, tokens in enumerate(prompt.tolist()):
        shared = min(tokens - 1, 64)
        segments.append((Segment(i % 3, 0, shared), Segment(prompt_key(i), 0, tokens - shared)))
    return Trace(
        "contract",
        "generated",
        np.cumsum(rng.exponential(15e6, n)).astype(np.int64),
        prompt,
        rng.integers(1, 60, n),
        segments=segments,
        priority=rng.integers(0, 3, n),
        tenant=[f"t{i % 4}" for i in range(n)],
    )


def run(kind: str, name: str, trace: Trace, **fields: Any) -> Result:
    scenario = Scenario.of(
        **{
            FIELD.get(kind, kind): name,
            "engine": {
                "num_gpu_blocks": 80,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 256,
                "max_model_len": 512,
            },
            "cluster": {"replicas": 2},
            "capacity_probe": False,
            **fields,
        }
    )
    simulation = Simulation(scenario)
    simulation.serve(trace)
    simulation.run()
    result = simulation.result()
    check_conservation(simulation, result)
    return result


@pytest.mark.parametrize(("kind", "name"), ALL)
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_everything_is_accounted_for_and_the_run_repeats(
    kind: str, name: str, asynchronous: bool
) -> None:
    trace = workload()
    fields = {"engine.async_scheduling": asynchronous}
    scenario_fields: dict[str, Any] = {}
    first = run(kind, name, trace, **scenario_fields, **_engine(fields))
    counts = first.summary["requests"]
    assert counts["total"] == len(trace)
    if name not in ENDS_SOME:
        assert counts["completed"] == len(trace)
    again = run(kind, name, trace, **scenario_fields, **_engine(fields))
    assert first.summary == again.summary
    assert first.requests.equals(again.requests)
    assert first.steps.equals(again.steps)


def _engine(fields: dict[str, Any]) -> dict[str, Any]:
    engine = {
        "num_gpu_blocks": 80,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
    }
    engine.update({name.split(".")[1]: value for name, value in fields.items()})
    return {"engine": engine}


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_no_decision_knows_the_output_length_of_a_request_that_is_not_done(
    kind: str, name: str
) -> None:
    """Longer outputs for all who are unfinished at a time change nothing before it."""
    trace = workload()
    before = run(kind, name, trace)
    moment = int(np.median(trace.arrival_ns))
    rows = before.rows
    unfinished = (rows["finish_ns"] > moment) | (rows["finish_ns"] < 0)
    longer = trace.output_tokens.copy()
    longer[rows["uid"][unfinished]] += 40
    after = run(kind, name, replace(trace, output_tokens=longer))
    for log, other in zip(before.logs, after.logs, strict=True):
        ours, theirs = log.table(), other.table()
        past = int((ours["end_ns"] <= moment).sum())
        for column in ours:
            assert ours[column][:past].tolist() == theirs[column][:past].tolist(), column
    for column in ("first_scheduled_ns", "first_token_ns", "queued_ns"):
        early = (rows[column] >= 0) & (rows[column] <= moment)
        assert (rows[column][early] == after.rows[column][early]).all()
