"""The simulation from Python: whole traces, live arrivals, horizons, timeouts, warm-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from sim import Request, Scenario, Simulation, UserError, simulate
from sim.request import Trace
from tests.checks import check_conservation

WORKLOAD = "poisson:rate=6,n=80,prompt=lognormal(300,900),output=lognormal(30,90)"


def requests(n: int, gap_s: float = 0.1, output: int = 20) -> list[Request]:
    return [Request(i, f"r{i}", round(i * gap_s * 1e9), 100 + i, output) for i in range(n)]


def test_submitting_by_hand_is_the_same_as_a_trace() -> None:
    """In one go, or a request at a time with time advancing in between."""
    fields: dict[str, Any] = {"capacity_probe": False, "cluster": {"replicas": 2}}
    given = requests(30)
    trace = Trace(
        "t",
        "columns",
        np.array([r.arrival_ns for r in given]),
        np.array([r.prompt_tokens for r in given]),
        np.array([r.output_tokens for r in given]),
        ids=[r.id for r in given],
    )
    whole = simulate(trace=trace, **fields)
    at_once = Simulation(Scenario.of(**fields))
    for request in given:
        at_once.submit(request)
    at_once.run()
    one_by_one = Simulation(Scenario.of(**fields))
    for request in given:
        one_by_one.advance(max(0.0, request.arrival_ns / 1e9 - 0.03))
        one_by_one.submit(request)
    one_by_one.advance(1000)
    for other in (at_once, one_by_one):
        result = other.result()
        pd.testing.assert_frame_equal(result.requests, whole.requests)
        pd.testing.assert_frame_equal(result.steps, whole.steps)


def test_looking_at_the_result_on_the_way_changes_nothing() -> None:
    looked, blind = (Simulation(Scenario.of(capacity_probe=False)) for _ in range(2))
    for simulation in (looked, blind):
        for request in requests(20):
            simulation.submit(request)
    for second in range(1, 10):
        looked.advance(second * 0.25)
        partly = looked.result()
        check_conservation(looked, partly)
    counts = looked.result().summary["requests"]
    blind.run()
    looked.run()
    pd.testing.assert_frame_equal(looked.result().requests, blind.result().requests)
    assert counts["total"] == 20


def test_requests_in_the_past_or_with_a_number_twice_are_refused() -> None:
    simulation = Simulation(Scenario())
    simulation.submit(Request(0, "a", 0, 10, 2))
    with pytest.raises(UserError, match="uid 0 is taken"):
        simulation.submit(Request(0, "b", 5, 10, 2))
    simulation.advance(1)
    with pytest.raises(UserError, match="before now"):
        simulation.submit(Request(1, "c", 5, 10, 2))
    with pytest.raises(UserError, match="cannot advance"):
        simulation.advance(0.5)


def test_aborting_a_live_request() -> None:
    simulation = Simulation(Scenario.of(capacity_probe=False))
    simulation.submit(Request(0, "a", 0, 100, 5000))
    simulation.submit(Request(1, "b", 0, 100, 50))
    simulation.advance(2)
    simulation.abort(0)
    simulation.run()
    result = simulation.result()
    assert result.requests["status"].tolist() == ["aborted", "completed"]
    assert result.requests["reason"].tolist() == ["client", ""]
    assert 0 < result.requests["output_tokens"][0] < 5000
    assert result.summary["requests"]["aborted_by_reason"] == {"client": 1}


def test_the_horizon_leaves_unfinished_requests_and_says_so() -> None:
    result = simulate(generate=WORKLOAD, horizon_s=5)
    counts = result.summary["requests"]
    assert counts["unfinished"] > 0
    assert counts["total"] == counts["completed"] + counts["unfinished"]
    assert counts["total"] == int((result.requests["arrival_s"] <= 5).sum()) < 80
    assert result.summary["run"]["simulated_s"] == 5
    assert result.requests["finish_s"].max() <= 5


def test_clients_that_give_up() -> None:
    result = simulate(generate=WORKLOAD, client={"timeout_s": 0.5}, engine={"max_num_seqs": 2})
    counts = result.summary["requests"]
    assert counts["aborted_by_reason"] == {"timeout": counts["aborted"]}
    assert counts["aborted"] > 10
    completed = result.requests[result.requests["status"] == "completed"]
    assert (completed["finish_s"] - completed["arrival_s"] <= 0.5 + 1e-9).all()


def test_warm_up_is_left_out_of_latencies_and_said() -> None:
    every = simulate(generate=WORKLOAD).summary
    trimmed = simulate(generate=WORKLOAD, warm_up_s=4).summary
    assert trimmed["requests"]["warm_up_s"] == 4
    assert trimmed["requests"]["measured"] < every["requests"]["measured"] == 80
    assert trimmed["e2e_s"]["count"] == trimmed["requests"]["measured"]
    assert trimmed["run"]["steps"] == every["run"]["steps"]


def test_client_side_latencies_contain_the_way_there_and_back() -> None:
    near, far = (
        simulate(generate=WORKLOAD, cost={"frontend": name}, capacity_probe=False)
        for name in ("none", "http")
    )
    assert (near.requests["ttft_s"] < far.requests["ttft_s"]).mean() > 0.9
    for result in (near, far):
        table = result.requests
        output = table["output_tokens"]
        more = output > 1
        tpot = (table["e2e_s"] - table["ttft_s"]) / (output - 1)
        assert np.allclose(table["tpot_s"][more], tpot[more], rtol=1e-9, atol=1e-12)
        assert table["tpot_s"][~more].isna().all()
        way = table["ttft_s"] - (table["first_token_s"] - table["arrival_s"])
        assert ((way > 1e-6) == (result is far)).all()


def test_inter_token_gaps_are_those_of_the_requests() -> None:
    result = simulate(generate=WORKLOAD, cost={"frontend": "none"}, capacity_probe=False)
    itl, table = result.summary["itl_s"], result.requests
    assert itl["count"] == (table["output_tokens"] - 1).sum()
    decode_s = (table["finish_s"] - table["first_token_s"]).sum()
    assert itl["mean"] * itl["count"] == pytest.approx(decode_s, rel=1e-9)


def test_time_parts_sum_to_the_time_of_all_replicas() -> None:
    summary = simulate(generate=WORKLOAD, cluster={"replicas": 3}).summary
    total = sum(summary["time"].values())
    assert total == pytest.approx(3 * summary["run"]["simulated_s"], rel=1e-6)


def test_goodput_counts_those_who_meet_every_limit() -> None:
    slo = {"ttft_s": 0.08, "tpot_s": 0.02, "e2e_s": 1.0}
    result = simulate(generate=WORKLOAD, slo=slo)
    table = result.requests
    good = (
        (table["ttft_s"] <= 0.08)
        & (table["tpot_s"].isna() | (table["tpot_s"] <= 0.02))
        & (table["e2e_s"] <= 1.0)
    )
    assert 0 < good.sum() < len(table)
    assert result.summary["goodput"]["slo_attainment"] == good.mean()


def test_one_simulation_serves_one_trace() -> None:
    trace = Trace("t", "columns", np.array([0]), np.array([5]), np.array([2]))
    simulation = Simulation(Scenario())
    simulation.serve(trace)
    with pytest.raises(UserError, match="one trace"):
        simulation.serve(trace)


def test_nothing_at_all_is_a_result_too() -> None:
    summary = Simulation(Scenario()).result().summary
    assert summary["requests"]["total"] == 0
    assert summary["ttft_s"]["mean"] is None
    assert summary["throughput"]["requests_per_s"] is None
    assert summary["stability"]["capacity_requests_per_s"] is None


@pytest.mark.parametrize("replicas", [1, 3])
def test_fast_forward_changes_nothing(replicas: int) -> None:
    fields: dict[str, Any] = {"generate": WORKLOAD, "cluster": {"replicas": replicas}}
    fast = simulate(**fields)
    plain = simulate(**fields, fast_forward=False)
    pd.testing.assert_frame_equal(fast.requests, plain.requests)
    pd.testing.assert_frame_equal(fast.steps, plain.steps)
    one, other = dict(fast.summary), dict(plain.summary)
    assert one.pop("run")["engine"] == "fast"
    assert other.pop("run")["engine"] == "plain"
    assert one == other


def test_measuring_the_capacity_leaves_the_other_figures_alone() -> None:
    with_probe, without = (
        simulate(generate=WORKLOAD, capacity_probe=probe).summary for probe in (True, False)
    )
    assert with_probe["stability"].pop("capacity_requests_per_s") is not None
    assert without["stability"].pop("capacity_requests_per_s") is None
    del with_probe["stability"], without["stability"]
    assert with_probe == without
