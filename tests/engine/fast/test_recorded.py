"""The fast engine against recorded schedules of vLLM itself, without the plain engine between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.engine.fast import FastEngine, why_plain
from sim.request import Request
from tests.conformance.harness import engine_config, sequence
from tests.engine.fast.double import LinearCost
from tests.engine.fast.drive import Script, run

CASES = Path(__file__).parents[2] / "conformance" / "cases"
TICKS = 1 << 20
"""Nanoseconds per second of a recording, whose times are dyadic fractions."""


def comparable() -> list[Path]:
    """Cases the fast engine covers. Left out are those that count steps while two are in flight
    (a step number is no time then) and aborts (the recorder delays them to the next schedule)."""
    found = []
    for path in sorted(CASES.glob("*.case.json")):
        case = json.loads(path.read_text())
        config = engine_config(case)
        has_times = case.get("step_time") is not None or not config.async_scheduling
        if has_times and why_plain(config) is None and not case.get("aborts"):
            found.append(path)
    return found


def requests(case: dict[str, Any]) -> list[Request]:
    made = []
    for index, spec in enumerate(case["requests"]):
        timed = case.get("step_time") is not None
        request = sequence(spec, index, timed).request
        request.uid = spec["uid"]
        request.arrival_ns = int(spec["arrival_time"] * TICKS) if timed else spec["arrival_step"]
        made.append((request.arrival_ns, index, request))
    return [request for _, _, request in sorted(made, key=lambda entry: entry[:2])]


@pytest.mark.parametrize("path", comparable(), ids=lambda p: p.name.split(".")[0])
def test_schedule_is_the_recorded_one(path: Path):
    case = json.loads(path.read_text())
    expected = json.loads(path.with_name(path.name.replace(".case.", ".expected.")).read_text())
    step_time = case.get("step_time") or {"a": 1 / TICKS, "b": 0}
    cost = LinearCost(int(step_time["a"] * TICKS), int(step_time["b"] * TICKS), 0, 0, 0)
    config = engine_config(case)
    seen = run(FastEngine(config, cost), Script(requests(case)), check=len(case["requests"]) < 100)

    steps = [step for step in expected["steps"] if tokens(step)]
    preempted = preemptions_by_step_with_tokens(expected["steps"])
    assert [tokens(step) for step in steps] == [
        a + b for a, b in zip(seen["log decode_tokens"], seen["log prefill_tokens"], strict=True)
    ]
    assert preempted == seen["log num_preempted"]
    assert [config.num_usable_blocks - step["free"][0] for step in steps] == seen[
        "log kv_used_blocks"
    ]
    assert [step["q"] for step in steps] == [
        list(queues)
        for queues in zip(seen["log num_running"], seen["log num_waiting"], strict=True)
    ]
    rows = {step["i"]: row for row, step in enumerate(steps)}
    ids = {spec["uid"]: spec["id"] for spec in case["requests"]}
    fates = {}
    for _, uid, *_, cached, preemptions, _, spans in seen["left"]:
        fates[ids[uid]] = [spans[0][0], spans[-1][1], preemptions, cached]
    assert fates == {
        name: [rows[first], rows[finish], preemptions, hit]
        for name, (first, finish, preemptions, hit) in expected["requests"].items()
    }


def tokens(step: dict[str, Any]) -> int:
    return step["tok"] if "tok" in step else sum(entry[1] for entry in step["s"])


def preemptions_by_step_with_tokens(steps: list[dict[str, Any]]) -> list[int]:
    """Victims per step; those of empty steps count in the next."""
    counts, carried = [], 0
    for step in steps:
        carried += len(step["pre"])
        if tokens(step):
            counts.append(carried)
            carried = 0
    return counts
