"""Invariants of every run: requests, tokens and blocks are conserved, time goes forward."""

from __future__ import annotations

import numpy as np

from sim import Result, Simulation
from sim.cluster.records import STATUSES
from sim.engine.interface import Status


def check_conservation(simulation: Simulation, result: Result) -> None:
    """Raises AssertionError when something is lost, counted twice, or out of order."""
    check_requests(simulation, result)
    check_times(result)
    check_tokens(result)
    check_blocks(simulation, result)


def check_requests(simulation: Simulation, result: Result) -> None:
    uid = result.rows["uid"]
    assert len(np.unique(uid)) == len(uid) == simulation.cluster.num_entered
    counts = result.summary["requests"]
    assert counts["total"] == len(uid)
    assert sum(counts[s.value] for s in STATUSES) == len(uid)
    for name in ("rejected", "aborted", "unfinished"):
        assert sum(counts[f"{name}_by_reason"].values()) == counts[name]
    inside = len(simulation.cluster.inside())
    assert counts["unfinished"] == inside
    held = sum(replica.num_requests for replica in simulation.cluster.replicas)
    assert held <= inside


def check_times(result: Result) -> None:
    rows = result.rows
    stamps = [
        rows[f"{name}_ns"] for name in ("arrival", "queued", "first_scheduled", "first_token")
    ]
    completed = rows["status"] == STATUSES.index(Status.COMPLETED)
    for earlier, later in zip(stamps, [*stamps[1:], rows["finish_ns"]], strict=True):
        assert (earlier[completed] <= later[completed]).all()
        assert (later[completed] >= 0).all()
    for log in result.logs:
        table = log.table()
        assert (table["end_ns"] > table["start_ns"]).all()
        assert (np.diff(table["end_ns"]) > 0).all()


def check_tokens(result: Result) -> None:
    rows = result.rows
    completed = rows["status"] == STATUSES.index(Status.COMPLETED)
    assert (rows["output_tokens"] <= rows["wanted_tokens"]).all()
    cut = completed & (rows["output_tokens"] < rows["wanted_tokens"])
    assert int(cut.sum()) == result.summary["requests"]["truncated"]
    assert (rows["output_tokens"][completed] >= 1).all()
    everyone_left = (rows["finish_ns"] >= 0).all()
    speculative = result.system.config.speculative
    for replica, log in enumerate(result.logs):
        here = rows["replica"] == replica
        table = log.table()
        delivered = int(rows["output_tokens"][here].sum())
        if everyone_left and not speculative:
            assert int(table["num_sampled"].sum()) >= delivered
            if (completed | ~here).all():
                assert int(table["num_sampled"].sum()) == delivered
        gaps = table["num_gaps"].sum() + len(log.long_gaps()[0]) + log.num_zero_gaps
        had = here & (rows["output_tokens"] > 0)
        assert int(gaps) == int((rows["output_tokens"][had] - 1).sum())
        if (completed | ~here).all():
            fresh = rows["prompt_tokens"] - rows["cached_tokens"] + rows["recomputed_tokens"]
            computed = int(table["prefill_tokens"].sum()) + int(table["decode_tokens"].sum())
            decoded = int(np.maximum(rows["output_tokens"][here] - 1, 0).sum())
            if not speculative:
                assert computed == int(fresh[here].sum()) + decoded


def check_blocks(simulation: Simulation, result: Result) -> None:
    for replica, log in zip(simulation.cluster.replicas, result.logs, strict=True):
        used = log.table()["kv_used_blocks"]
        assert ((used >= 0) & (used <= replica.num_blocks)).all()
        if not replica.engine.drain():
            assert replica.engine.kv_used_blocks(simulation.clock.now_ns) == 0
