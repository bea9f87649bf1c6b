"""Requests handed over from Python: what is wrong with them is said, not simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim import Request, Scenario, Segment, Simulation, Trace, UserError, simulate

WORKLOAD = "constant:rate=4,n=5,prompt=20,output=3"
GOOD: dict[str, Any] = {
    "arrival_ns": [0, 1, 2],
    "prompt_tokens": [1, 2, 3],
    "output_tokens": [1, 2, 3],
}


def trace(**changes: Any) -> Trace:
    columns = {k: np.array(v, dtype=np.int64) for k, v in GOOD.items()} | changes
    return Trace("mine", "columns", **columns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": np.array([1, 2])}, "2 prompt_tokens of 3 requests"),
        ({"prompt_tokens": np.array([1, 0, 3])}, r"prompt_tokens\[1\] is 0; it must be 1 to"),
        ({"output_tokens": np.array([1, 2, -3])}, r"output_tokens\[2\] is -3"),
        ({"output_tokens": np.array([1, 2, 1 << 40])}, r"output_tokens\[2\] is 1099511627776"),
        ({"arrival_ns": np.array([0, 5, 4])}, r"arrival_ns\[2\] is earlier"),
        ({"arrival_ns": np.array([-1, 5, 6])}, "arrival_ns must be at least 0"),
        ({"arrival_ns": np.array([0, 5, 1 << 62])}, "below 2"),
        ({"arrival_ns": [0, 1, 2]}, "arrival_ns must be a numpy array of whole numbers"),
        ({"arrival_ns": np.array([0.0, 1.0, 2.0])}, "array of whole numbers"),
        ({"priority": np.array([1])}, "1 priority of 3 requests"),
        ({"segments": [()]}, "1 segments of 3 requests"),
        ({"ids": ["a"]}, "1 ids of 3 requests"),
    ],
)
def test_columns_that_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        simulate(trace=trace(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uid": -1}, "uid must be a whole number"),
        ({"uid": "a"}, "uid must be a whole number"),
        ({"arrival_ns": 1.5}, "arrival_ns must be a whole number"),
        ({"arrival_ns": 1 << 63}, "arrival_ns must be a whole number"),
        ({"prompt_tokens": 0}, "prompt_tokens must be a whole number of 1 to"),
        ({"output_tokens": -3}, "output_tokens must be a whole number of 1 to"),
        ({"output_tokens": None}, "output_tokens must be a whole number of 1 to"),
        ({"priority": "high"}, "priority must be a whole number"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of 1 to"),
        ({"segments": ()}, "segments of 0 tokens for a prompt of 10"),
        ({"segments": (Segment(1, 0, 5),)}, "segments of 5 tokens for a prompt of 10"),
        ({"segments": (Segment(1, -5, 10),)}, "is no segment of a text"),
    ],
)
def test_submitted_requests_that_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    fields = {"uid": 0, "id": "a", "arrival_ns": 0, "prompt_tokens": 10, "output_tokens": 3}
    with pytest.raises(UserError, match=message):
        Simulation(Scenario.of()).submit(Request(**(fields | changes)))


def test_what_is_no_request_or_trace() -> None:
    simulation = Simulation(Scenario.of())
    with pytest.raises(UserError, match=r"a request is a sim\.Request"):
        simulation.submit("hello")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a trace is a sim\.Trace"):
        simulation.serve("a.csv")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"simulate\(\) takes a Scenario"):
        simulate("a.csv")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"Scenario\.of\(\) takes plain values"):
        Scenario(policy="static")  # type: ignore[arg-type]
    for until in (float("nan"), float("inf")):
        with pytest.raises(UserError, match="cannot advance"):
            simulation.advance(until)


def test_a_scenario_takes_its_part_of_a_trace() -> None:
    result = simulate(trace=trace(), limit=2, rate_scale=0.5)
    assert result.rows["arrival_ns"].tolist() == [0, 2]
    with pytest.raises(UserError, match="leave one"):
        simulate(Scenario.of(generate=WORKLOAD), trace=trace())


def test_numpy_numbers_are_numbers() -> None:
    scenario = Scenario.of(
        generate=WORKLOAD, seed=np.int64(3), limit=np.int32(2), rate_scale=np.float32(2)
    )
    assert Scenario.from_dict(scenario.to_dict()) == scenario
    assert "seed: 3" in scenario.to_yaml()
    assert simulate(scenario).summary["requests"]["total"] == 2


def test_what_did_not_arrive_before_the_horizon_is_counted() -> None:
    result = simulate(generate=WORKLOAD, horizon_s=0.6)
    requests = result.summary["requests"]
    assert requests["total"] + requests["not_arrived"] == 5
    assert f"{requests['not_arrived']} not arrived yet" in str(result)


def test_clients_that_all_give_up_are_no_stable_system() -> None:
    stability = simulate(generate=WORKLOAD, client={"timeout_s": 1e-6}).summary["stability"]
    assert stability["verdict"] == "near-capacity"
    assert "100% of the requests are given up" in stability["sentence"]
