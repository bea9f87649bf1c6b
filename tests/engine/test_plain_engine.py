"""The plain engine: time, records and log against closed forms and against the bare scheduler."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sim.engine.config import EngineConfig
from sim.engine.executor import AcceptanceRate
from sim.engine.interface import Status
from sim.engine.plain import PlainEngine
from sim.engine.sequence import Sequence
from sim.errors import UserError
from sim.request import Request, output_key
from tests.conformance.fuzz import random_case
from tests.conformance.harness import Run, engine_config, sequence
from tests.engine.drive import StubCost, by_uid, drive, request

SYNC = EngineConfig(num_gpu_blocks=101, async_scheduling=False, max_num_batched_tokens=64,
                    max_num_seqs=8)  # fmt: skip
ASYNC = replace(SYNC, async_scheduling=True)


def serve(config, requests, aborts=(), **more):
    engine = PlainEngine(config, StubCost(), **more)
    return engine, drive(engine, requests, aborts)


@pytest.mark.parametrize("config", [SYNC, ASYNC], ids=["sync", "async"])
def test_lone_request_takes_the_sum_of_its_steps(config):
    engine, (record,) = serve(config, [request(0, 500, 100, 5)])
    chunks = (1000 + 640) + (1000 + 360)
    assert record.status is Status.COMPLETED
    assert record.first_scheduled_ns == 500
    assert record.first_token_ns == 500 + chunks
    assert record.finish_ns == 500 + chunks + 4 * 1010
    assert record.output_tokens == 5
    assert record.token_spans == ((1, 5),)
    table = engine.log.table()
    assert table["prefill_tokens"].tolist() == [64, 36, 0, 0, 0, 0]
    assert table["decode_context"].tolist() == [0, 0, 101, 102, 103, 104]
    assert table["num_sampled"].tolist() == [0, 1, 1, 1, 1, 1]
    assert table["num_gaps"].tolist() == [0, 0, 1, 1, 1, 1]
    assert table["kv_used_blocks"].tolist() == [4, 7, 7, 7, 7, 7]
    assert engine.kv_used_blocks(10**9) == 0
    assert engine.wake_ns() is None


def test_a_newcomer_waits_for_the_step_in_flight_and_with_async_for_the_queued_one():
    for config, steps in ((SYNC, 1), (ASYNC, 2)):
        first = request(0, 0, 10, 50)
        _, records = serve(config, [first, request(1, 5 * 1010 + 400, 10, 2)])
        late = by_uid(records)[1]
        step_in_flight = 1100 + 5 * 1010  # ends after the arrival
        assert late.first_scheduled_ns == step_in_flight + (steps - 1) * 1010
        assert late.first_token_ns == late.first_scheduled_ns + 1000 + 11 * 10


def test_arrivals_at_the_end_of_a_step_join_the_next():
    _, records = serve(SYNC, [request(0, 0, 10, 3), request(1, 1100, 10, 1)])
    assert by_uid(records)[1].first_scheduled_ns == 1100


def test_requests_that_never_fit_are_rejected_with_a_reason():
    config = replace(SYNC, max_model_len=4096, num_gpu_blocks=11)
    _, records = serve(
        config,
        [request(0, 0, 4096, 1), request(1, 0, 150, 20), request(2, 7, 150, 11)],
    )
    found = by_uid(records)
    assert (found[0].status, found[0].reason) == (Status.REJECTED, "context")
    assert (found[1].status, found[1].reason) == (Status.REJECTED, "kv-capacity")
    assert found[2].status is Status.COMPLETED
    assert found[2].output_tokens == 11


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_chunked_prefill": False, "max_model_len": 64, "max_num_scheduled_tokens": 63},
        {"num_speculative_tokens": 7, "max_num_scheduled_tokens": 7},
        {"num_speculative_tokens": 4, "long_prefill_token_threshold": 3},
    ],
)
def test_settings_that_would_get_stuck_are_refused(settings):
    with pytest.raises(UserError, match="engine settings"):
        PlainEngine(replace(SYNC, **settings), StubCost())


def test_equal_priorities_and_arrivals_do_not_evict_each_other_for_ever():
    config = replace(SYNC, num_gpu_blocks=8, block_size=4, policy="priority",
                     scheduler_reserve_full_isl=False, enable_prefix_caching=False)  # fmt: skip
    _, records = serve(config, [request(i, 0, 8, 16) for i in range(3)])
    assert [record.status for record in records] == [Status.COMPLETED] * 3


def test_generation_stops_at_the_longest_context():
    _, (record,) = serve(replace(SYNC, max_model_len=50), [request(0, 0, 40, 100)])
    assert record.status is Status.COMPLETED
    assert record.output_tokens == 10


def test_aborts_free_at_once_and_keep_what_was_delivered():
    requests = [request(0, 0, 10, 50), request(1, 0, 10, 50), request(2, 0, 10, 50)]
    config = replace(SYNC, max_num_seqs=2)
    engine, records = serve(config, requests, [(1200 + 2 * 1020 + 5, 0), (1200 + 10, 2)])
    found = by_uid(records)
    assert found[0].status is Status.ABORTED
    assert found[0].output_tokens == 3
    assert found[0].finish_ns == 1200 + 2 * 1020 + 5
    assert found[2].status is Status.ABORTED
    assert found[2].output_tokens == 0
    assert found[2].first_scheduled_ns == -1
    assert found[1].output_tokens == 50
    assert engine.num_running == engine.num_waiting == 0
    assert engine.kv_used_blocks(0) == 0


def test_abort_of_a_request_that_left_changes_nothing():
    engine, records = serve(SYNC, [request(0, 0, 10, 1)])
    engine.abort(0, 10**6)
    assert len(records) == 1


def test_drain_reports_and_changes_nothing():
    engine = PlainEngine(ASYNC, StubCost())
    engine.submit(request(0, 0, 10, 50), 0)
    engine.submit(request(1, 0, 500, 50), 0)
    for _ in range(4):
        engine.advance(engine.wake_ns())
    first, again = engine.drain(), engine.drain()
    assert first == again
    assert [record.status for record in first] == [Status.UNFINISHED] * 2
    assert first[0].output_tokens > 0
    assert engine.num_running == 2


def test_gaps_are_exact_over_preemption():
    # Two requests that do not fit together: the younger is preempted and recomputes.
    config = replace(SYNC, num_gpu_blocks=8, scheduler_reserve_full_isl=False, block_size=4,
                     enable_prefix_caching=False)  # fmt: skip
    engine, records = serve(config, [request(0, 0, 8, 12), request(1, 0, 8, 12)])
    found = by_uid(records)
    assert found[1].preemptions == 1
    assert found[1].recomputed_tokens > 0
    assert len(found[1].token_spans) == 2
    gap_ns, counts = engine.log.gaps()
    assert counts.sum() == sum(record.output_tokens - 1 for record in records)
    total = sum(record.finish_ns - record.first_token_ns for record in records)
    assert int((gap_ns * counts).sum()) == total


@pytest.mark.parametrize("config", [SYNC, ASYNC], ids=["sync", "async"])
def test_no_oracle(config):
    """Redrawing output lengths of requests that have not finished changes no earlier step."""
    config = replace(config, num_gpu_blocks=20)
    rng = np.random.default_rng(5)
    requests = [
        request(i, int(rng.integers(0, 20_000)), int(rng.integers(5, 60)),
                int(rng.integers(2, 40)), max_tokens=60)
        for i in range(30)
    ]  # fmt: skip
    requests.sort(key=lambda r: r.arrival_ns)
    engine, records = serve(config, requests)
    cut = int(np.median([record.finish_ns for record in records]))
    changed = [
        r
        if by_uid(records)[r.uid].finish_ns <= cut
        else replace(r, output_tokens=r.output_tokens + 7)
        for r in requests
    ]
    other, _ = serve(config, changed)
    table, other_table = engine.log.table(), other.log.table()
    before = int(np.searchsorted(table["end_ns"], cut))
    assert before > 10
    for name, column in table.items():
        assert column[:before].tolist() == other_table[name][:before].tolist(), name


def test_speculation_delivers_all_tokens_in_fewer_steps():
    config = replace(SYNC, num_speculative_tokens=3, spec_method="eagle")
    plain, _ = serve(SYNC, [request(0, 0, 10, 60)])
    for rate, steps in ((0.0, 60), (1.0, 1 + 15)):
        engine, (record,) = serve(
            config, [request(0, 0, 10, 60)], acceptance=AcceptanceRate((rate,))
        )
        assert record.output_tokens == 60
        assert len(engine.log) == steps
        gap_ns, counts = engine.log.gaps()
        assert counts.sum() == 59
        assert int((gap_ns * counts).sum()) == record.finish_ns - record.first_token_ns
    assert len(plain.log) == 60


def test_acceptance_depends_on_the_request_only():
    rate = AcceptanceRate((0.6, 0.4), seed=3)
    seqs = [Sequence(request(uid, 0, 5, 5)) for uid in range(400)]
    counts = [rate.accepted(seq, k, 3) for seq in seqs for k in range(5)]
    assert counts == [rate.accepted(seq, k, 3) for seq in seqs for k in range(5)]
    assert np.mean([c >= 1 for c in counts]) == pytest.approx(0.6, abs=0.04)
    assert np.mean([c >= 2 for c in counts]) == pytest.approx(0.24, abs=0.04)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pipeline_overlaps_steps_and_decodes_once_per_round(asynchronous):
    config = replace(
        SYNC, pipeline_parallel_size=4, max_num_batched_tokens=8, async_scheduling=asynchronous
    )
    engine, (record,) = serve(config, [request(0, 0, 32, 3)])
    # Four chunks of 8 enter stage one after another; a step has four stages of 1080 ns.
    assert record.first_token_ns == (4 + 3) * 1080
    # A lone request's next token needs the last one: a whole round each.
    assert record.finish_ns == record.first_token_ns + 2 * 4 * 1010
    table = engine.log.table()
    assert table["start_ns"][:4].tolist() == [0, 1080, 2160, 3240]
    assert table["end_ns"][:4].tolist() == [4320, 5400, 6480, 7560]


def test_a_full_pipeline_has_the_throughput_of_one_stage():
    config = replace(SYNC, pipeline_parallel_size=2, max_num_seqs=8, max_num_batched_tokens=8)
    _, records = serve(config, [request(i, 0, 8, 40) for i in range(2)])
    both = max(record.finish_ns for record in records)
    _, (alone,) = serve(config, [request(0, 0, 8, 40)])
    # Two requests alternate in the two stages: hardly slower than one.
    assert both < 1.1 * alone.finish_ns


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pipeline_decodes_are_staggered(asynchronous):
    config = replace(SYNC, pipeline_parallel_size=2, async_scheduling=asynchronous)
    engine, records = serve(config, [request(i, 0, 8, 30) for i in range(3)])
    assert all(record.output_tokens == 30 for record in records)
    assert engine.log.table()["num_sampled"].sum() == 90


def test_a_declared_limit_costs_one_step_more_with_async():
    """The scheduler cannot foresee an early end, so one step is in flight for nothing."""
    exact, _ = serve(ASYNC, [request(0, 0, 10, 5)])
    early, (record,) = serve(ASYNC, [request(0, 0, 10, 5, max_tokens=50)])
    assert record.output_tokens == 5
    assert len(early.log) == len(exact.log) + 1
    assert early.log.table()["num_gaps"].sum() == 4


UNITS = 1 << 24


class CaseCost(StubCost):
    def __init__(self, step_time):
        super().__init__(int(step_time["a"] * UNITS), int(step_time["b"] * UNITS))


class CasePatterns:
    """Accepts and proposes drafts as a case says."""

    def __init__(self, case):
        self.requests = {r["id"]: r for r in case["requests"]}

    def accepted(self, seq, verification, num_drafts):
        pattern = self.requests[seq.id].get("accept", [0])
        return min(num_drafts, pattern[verification % len(pattern)])

    def proposed(self, seq, proposal, most):
        pattern = self.requests[seq.id].get("draft", [most])
        return min(most, pattern[proposal % len(pattern)])


def test_engine_makes_the_schedule_of_the_conformance_loop():
    """The event loop in ns plans the same steps at the same times as vLLM's loop in seconds."""
    compared = 0
    for seed in range(300):
        case = random_case(seed)
        if "step_time" in case and "aborts" not in case and not _has_ties(case):
            compared += compare_with_conformance_loop(case)
    assert compared > 50


def _has_ties(case):
    """Requests of equal priority and arrival: the engine breaks the tie, the recorder does not."""
    ranks = [(r.get("priority", 0), r["arrival_time"]) for r in case["requests"]]
    return case["config"]["policy"] == "priority" and len(set(ranks)) < len(ranks)


def compare_with_conformance_loop(case):
    """False when a request can never finish: vLLM gets stuck, the engine says so."""
    try:
        engine = PlainEngine(
            engine_config(case), CaseCost(case["step_time"]), acceptance=CasePatterns(case)
        )
    except UserError:
        return False
    planned = record_plans(engine)
    requests = []
    for index, spec in enumerate(case["requests"]):
        seq = sequence(spec, index, timed=True)
        assert seq.output_content == output_key(spec["uid"])
        requests.append(
            replace(seq.request, uid=spec["uid"], arrival_ns=int(spec["arrival_time"] * UNITS))
        )
    records = drive(engine, requests)
    if any(record.status is Status.REJECTED for record in records):
        return False
    run = Run(case).run()
    expected = [[entry[:3] for entry in step["s"]] for step in run.steps]
    assert json.dumps(planned) == json.dumps(expected), case["name"]
    if not engine.config.async_scheduling:
        starts = [round(step["t"] * UNITS) for step in run.steps if step["s"]]
        assert engine.log.table()["start_ns"].tolist() == starts
    for record in records:
        fate = run.fates[record.request.id]
        assert record.preemptions == fate.preemptions
        assert record.cached_tokens == fate.hit
        room = engine.config.max_model_len - record.request.prompt_tokens
        assert record.output_tokens == min(record.request.output_tokens, room)
    return True


def record_plans(engine):
    """The schedule the engine will make; its books are audited on the way."""
    scheduler = engine.scheduler
    schedule, planned = scheduler.schedule, []

    def recorded():
        had_work = scheduler.has_unfinished
        plan = schedule()
        scheduler.check_integrity()
        if had_work:
            entries = zip(plan.seqs, plan.num_tokens, plan.num_computed, strict=True)
            planned.append([[seq.id, n, c] for seq, n, c in entries])
        return plan

    scheduler.schedule = recorded
    return planned


def test_tokens_are_conserved():
    config = replace(ASYNC, num_gpu_blocks=24)
    rng = np.random.default_rng(1)
    requests = [
        Request(i, str(i), i * 700, int(rng.integers(1, 90)), int(rng.integers(1, 40)))
        for i in range(60)
    ]
    engine, records = serve(config, requests)
    table = engine.log.table()
    outputs = sum(record.output_tokens for record in records)
    assert outputs == sum(r.output_tokens for r in requests)
    computed = table["prefill_tokens"].sum() + table["num_decodes"].sum()
    known = sum(r.prompt_tokens + r.output_tokens - 1 for r in requests)
    assert sum(record.preemptions for record in records) > 3
    assert computed == known + sum(record.recomputed_tokens for record in records)
    assert np.all(np.diff(table["end_ns"]) > 0)
    assert np.all(table["start_ns"][1:] >= table["end_ns"][:-1])
