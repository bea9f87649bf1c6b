"""What the fast engine promises beyond equal results."""

from __future__ import annotations

import pytest

from sim.engine.config import EngineConfig
from sim.engine.fast import FastEngine, supports, why_plain
from sim.engine.interface import RequestRecord, Status
from sim.errors import UserError
from sim.protocols import SchedulingPolicy
from sim.request import Request
from tests.engine.fast.double import LinearCost

COST = LinearCost(1000, 10, 0, 0, 0)


def config(**settings: object) -> EngineConfig:
    return EngineConfig(**{"num_gpu_blocks": 1001, "max_model_len": 4096, **settings})


def serve(engine: FastEngine, *requests: Request) -> tuple[list[RequestRecord], int]:
    """Records, and how often the engine had to be woken."""
    records: list[RequestRecord] = []
    engine.on_finish = records.append
    wakes = 0
    for request in requests:
        while (wake := engine.wake_ns()) is not None and wake < request.arrival_ns:
            engine.advance(wake)
            wakes += 1
        engine.submit(request, request.arrival_ns)
    while (wake := engine.wake_ns()) is not None:
        engine.advance(wake)
        engine.check_integrity()
        wakes += 1
    return records, wakes


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_long_decode_is_a_handful_of_events(asynchronous: bool):
    engine = FastEngine(config(async_scheduling=asynchronous), COST)
    records, wakes = serve(engine, Request(0, "0", 0, 100, 3000))
    assert len(engine.log) == 3000
    assert wakes < 15
    assert records[0].token_spans == ((0, 2999),)
    assert records[0].finish_ns == 1000 + 100 * 10 + 2999 * 1010


def test_a_submission_moves_the_next_event_to_the_end_of_the_step_in_flight():
    engine = FastEngine(config(async_scheduling=False), COST)
    engine.submit(Request(0, "0", 0, 1, 50), 0)
    engine.advance(0)
    assert engine.wake_ns() > 5 * 1010
    engine.submit(Request(1, "1", 2500, 1, 1), 2500)
    assert engine.wake_ns() == 3 * 1010


def test_one_more_in_a_blocked_queue_moves_nothing_but_is_counted():
    engine = FastEngine(config(max_num_seqs=1, max_num_batched_tokens=64), COST)
    for uid in range(2):
        engine.submit(Request(uid, str(uid), 0, 1, 5), 0)
    engine.advance(0)
    wake = engine.wake_ns()
    engine.submit(Request(2, "2", 2500, 1, 1), 2500)
    assert engine.wake_ns() == wake
    assert engine.num_waiting == 2
    serve(engine)
    # Row 4 is planned when row 2 ends, at 3030: the first that sees it.
    assert engine.log.table()["num_waiting"].tolist()[:5] == [1, 1, 1, 1, 2]


def test_usage_between_events_is_that_of_the_rows_planned_by_then():
    engine = FastEngine(config(block_size=1, async_scheduling=False), COST)
    engine.submit(Request(0, "0", 0, 1, 50), 0)
    engine.advance(0)
    assert [engine.kv_used_blocks(now) for now in (0, 1010, 1011, 2020, 2021)] == [1, 1, 2, 2, 3]


def test_drain_settles_steps_that_have_ended_and_changes_nothing():
    engine = FastEngine(config(), COST)
    engine.submit(Request(0, "0", 0, 1, 50), 0)
    engine.advance(0)
    wake = engine.wake_ns()
    (record,) = engine.drain(5 * 1010)
    assert (record.status, record.output_tokens) == (Status.UNFINISHED, 5)
    assert record.token_spans == ((0, 4),)
    assert len(engine.log) == 5
    assert engine.wake_ns() == wake
    records, _ = serve(engine)
    assert records[0].token_spans == ((0, 49),)


def test_why_plain_names_what_is_missing():
    class Displacing(SchedulingPolicy):
        def displace(self, view):
            return ()

    assert supports(config())
    assert why_plain(config(pipeline_parallel_size=2)) == "pipeline parallelism"
    assert why_plain(config(num_speculative_tokens=2)) == "speculative decoding"
    assert why_plain(config(sliding_window=100)) == "sliding window"
    assert "displace()" in why_plain(config(), Displacing())
    with pytest.raises(UserError, match="sliding window"):
        FastEngine(config(sliding_window=100), COST)
