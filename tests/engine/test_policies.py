"""What policies declare and decide, on the plain path."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.scheduling.continuous import Continuous
from policies.scheduling.priority import Priority
from policies.scheduling.static import Static
from sim.engine.config import EngineConfig
from sim.engine.interface import Status
from sim.engine.plain import PlainEngine
from sim.engine.scheduler import Scheduler
from sim.errors import UserError
from sim.protocols import EvictionPolicy, Limits, Plan, SchedulingPolicy
from tests.conformance.harness import Run, engine_config
from tests.engine.drive import StubCost, by_uid, drive, request

CONFIG = EngineConfig(num_gpu_blocks=65, async_scheduling=False, max_num_batched_tokens=128,
                      max_num_seqs=8, max_model_len=128, block_size=4)  # fmt: skip
CASES = sorted((Path(__file__).parents[1] / "conformance" / "cases").glob("*.case.json"))


def serve(requests, policy=None, eviction=None, config=CONFIG, aborts=(), **more):
    engine = PlainEngine(config, StubCost(), policy, eviction, **more)
    schedule = engine.scheduler.schedule

    def audited():
        plan = schedule()
        engine.scheduler.check_integrity()
        return plan

    engine.scheduler.schedule = audited
    records = drive(engine, requests, aborts)
    engine.scheduler.check_integrity()
    assert engine.kv_used_blocks(0) == 0
    return engine, by_uid(records)


def workload(count=40, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.integers(0, 3000, count))
    return [
        request(i, int(arrivals[i]), int(rng.integers(1, longest)), int(rng.integers(1, 30)),
                priority=int(rng.integers(0, 3)), tenant=str(i % 2))
        for i in range(count)
    ]  # fmt: skip


def declared(**attributes: Any) -> SchedulingPolicy:
    return type("Declared", (SchedulingPolicy,), attributes)()


COMBINATIONS = list(
    itertools.product(
        ("mixed", "prefill-first", "whole-batch"),
        ("on-demand", "prompt", "declared", "max", "pow2", "oracle"),
        ("paged", "contiguous", "buddy"),
    )
)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("compose", "reserve", "layout"), COMBINATIONS)
def test_every_combination_serves_everything(compose, reserve, layout, asynchronous):
    policy = declared(compose=compose, reserve=reserve, layout=layout)
    config = replace(CONFIG, async_scheduling=asynchronous, num_gpu_blocks=49)
    requests = workload()
    engine, records = serve(requests, policy, config=config, aborts=[(9000, 3), (30_000, 11)])
    for r in requests:
        record = records[r.uid]
        assert record.status in (Status.COMPLETED, Status.ABORTED)
        if record.status is Status.COMPLETED:
            assert record.output_tokens == r.output_tokens
    assert len(records) == len(requests)
    if layout != "paged":
        assert engine.log.table()["cached_tokens"].sum() == 0


def test_prefill_first_never_mixes_and_admits_before_it_decodes():
    config = replace(CONFIG, enable_chunked_prefill=False)
    engine, records = serve(workload(), Continuous(), config=config)
    table = engine.log.table()
    assert not np.any((table["num_prefills"] > 0) & (table["num_decodes"] > 0))
    # Whole prompts: every chunk samples.
    assert np.all((table["num_sampled"] == table["num_prefills"])[table["num_prefills"] > 0])
    mixed, _ = serve(workload())
    both = mixed.log.table()
    assert np.any((both["num_prefills"] > 0) & (both["num_decodes"] > 0))
    assert all(record.status is Status.COMPLETED for record in records.values())


def test_prefill_first_keeps_a_watermark_even_when_idle():
    policy = declared(compose="prefill-first", reserve="prompt", watermark=0.5)
    config = replace(CONFIG, num_gpu_blocks=21, enable_prefix_caching=False)
    # 20 usable blocks, 10 stay free: 40 tokens are too many for ever, 39 + 1 fit.
    _, records = serve([request(0, 0, 41, 1), request(1, 0, 40, 1)], policy, config=config)
    assert records[0].status is Status.REJECTED
    assert records[1].status is Status.COMPLETED


def test_whole_batch_holds_slots_and_memory_to_the_end():
    policy = declared(compose="whole-batch", reserve="oracle")
    requests = [request(0, 0, 8, 2), request(1, 0, 8, 20), request(2, 1500, 8, 2)]
    engine, records = serve(requests, policy, config=replace(CONFIG, max_num_seqs=4))
    # Request 2 arrives while the batch runs and waits for its slowest member.
    assert records[0].finish_ns < records[1].finish_ns == records[2].first_scheduled_ns
    table = engine.log.table()
    first_batch = table["end_ns"] <= records[1].finish_ns
    assert set(table["kv_used_blocks"][first_batch]) == {3 + 7}


def test_whole_batch_forms_over_several_steps_when_the_budget_is_small():
    policy = declared(compose="whole-batch")
    config = replace(CONFIG, max_num_batched_tokens=16, max_num_seqs=4)
    engine, _ = serve([request(i, 0, 10, 3) for i in range(4)], policy, config=config)
    table = engine.log.table()
    assert table["prefill_tokens"].tolist() == [16, 16, 8, 0, 0]
    assert table["num_decodes"].tolist() == [0, 0, 0, 4, 4]


@pytest.mark.parametrize(
    ("reserve", "blocks"),
    [("on-demand", 3), ("prompt", 3), ("oracle", 5), ("pow2", 7), ("declared", 8), ("max", 32)],
)
def test_reservations_are_made_at_admission(reserve, blocks):
    engine, _ = serve(
        [request(0, 0, 10, 9, max_tokens=20)], declared(reserve=reserve), config=CONFIG
    )
    assert engine.log.table()["kv_used_blocks"][0] == blocks


def test_a_reservation_of_known_tokens_covers_all_chunks():
    config = replace(CONFIG, max_num_batched_tokens=8)
    engine, _ = serve([request(0, 0, 40, 2)], declared(reserve="prompt"), config=config)
    assert engine.log.table()["kv_used_blocks"].tolist()[:5] == [10] * 5
    engine, _ = serve([request(0, 0, 40, 2)], config=config)
    assert engine.log.table()["kv_used_blocks"].tolist()[:5] == [2, 4, 6, 8, 10]


def test_paging_wastes_less_than_reserving_and_batches_more():
    """PagedAttention's first claim, in the order of its figures 2 and 12."""
    requests = [request(i, i * 300, 10 + i % 20, 5 + (i * 7) % 23) for i in range(120)]
    config = replace(CONFIG, max_num_seqs=64, max_num_batched_tokens=512)
    wasted, batch, finish = {}, {}, {}
    for name, policy in {
        "paged": SchedulingPolicy(),
        "oracle": declared(reserve="oracle", layout="buddy"),
        "pow2": declared(reserve="pow2", layout="buddy"),
        "max": declared(reserve="max", layout="buddy"),
    }.items():
        engine, records = serve(requests, policy, config=config, track_waste=True)
        table, waste = engine.log.table(), engine.waste.table()
        assert len(engine.waste) == len(engine.log)
        crowded = table["num_waiting"] > 0
        used = table["kv_used_blocks"] * config.block_size
        parts = waste["tokens"] + waste["internal"] + waste["reserved"] + waste["never_used"]
        assert parts.tolist() == used.tolist()
        capacity = engine.num_blocks * config.block_size
        lost = waste["internal"] + waste["reserved"] + waste["never_used"] + waste["external"]
        wasted[name] = float((lost / capacity)[crowded].mean()) if crowded.any() else 0.0
        batch[name] = float(table["num_running"].mean())
        finish[name] = max(record.finish_ns for record in records.values())
    assert wasted["paged"] < 0.15 < wasted["oracle"] < wasted["pow2"] < wasted["max"]
    assert batch["paged"] > batch["oracle"] >= batch["pow2"] > batch["max"]
    assert finish["paged"] < finish["oracle"] < finish["max"]


def test_external_fragmentation_is_free_memory_out_of_reach():
    policy = declared(reserve="oracle", layout="contiguous")
    config = replace(CONFIG, num_gpu_blocks=17)
    # Four of 4 blocks fill the memory; the first and the third end, and 8 free blocks in two
    # runs do not do for the fifth, which needs 6.
    requests = [
        request(0, 0, 12, 4), request(1, 0, 4, 12), request(2, 0, 12, 4), request(3, 0, 4, 12),
        request(4, 1, 20, 4),
    ]  # fmt: skip
    engine, _ = serve(requests, policy, config=config, track_waste=True)
    assert 8 * 4 in engine.waste.table()["external"]


def test_static_is_the_slowest_of_the_classics():
    requests = workload(60, longest=40)
    config = replace(CONFIG, enable_chunked_prefill=False)
    finish = {}
    for policy in (SchedulingPolicy(), Continuous(), Static()):
        _, records = serve(requests, policy, config=config)
        finish[type(policy).__name__] = np.mean(
            [record.finish_ns - record.queued_ns for record in records.values()]
        )
    assert finish["Static"] > 1.3 * finish["Continuous"]
    assert finish["Static"] > 1.3 * finish["SchedulingPolicy"]


class Shortest(SchedulingPolicy):
    order = "key"

    def key(self, request: Any, view: Any) -> Any:
        return request.request.prompt_tokens


def test_key_orders_the_queue():
    requests = [request(0, 0, 60, 30)] + [request(i, 5, 70 - 10 * i, 1) for i in range(1, 6)]
    config = replace(CONFIG, max_num_seqs=1)
    for policy in (Shortest(), type("Each", (Shortest,), {"order": "key-each-step"})()):
        _, records = serve(requests, policy, config=config)
        assert [record.request.uid for record in records.values()] == [0, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("path", [p for p in CASES if "priority" in p.name], ids=lambda p: p.stem)
def test_priority_as_a_policy_is_vllms_priority(path):
    case = json.loads(path.read_text())
    expected = path.with_name(path.name.replace(".case.", ".expected.")).read_text()
    config = replace(engine_config(case), policy="fcfs")
    assert Run(case, scheduler=Scheduler(config, Priority())).run().document() == expected


class Freed(EvictionPolicy):
    """vLLM's order, asked block by block."""


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem.removesuffix(".case"))
def test_ranked_eviction_in_vllms_order_is_vllms(path):
    case = json.loads(path.read_text())
    expected = path.with_name(path.name.replace(".case.", ".expected.")).read_text()
    scheduler = Scheduler(engine_config(case), eviction=Freed())
    assert Run(case, check=True, scheduler=scheduler).run().document() == expected


def test_eviction_order_changes_hits():
    class Newest(EvictionPolicy):
        def order(self, block: Any) -> Any:
            return -block.freed_seq

    shared = {"segments": None}
    requests = [request(i, i * 100_000, 40, 2, **shared) for i in range(8)]
    again = [replace(r, uid=8 + r.uid, arrival_ns=(8 + r.uid) * 100_000,
                     segments=r.prompt_segments()) for r in requests]  # fmt: skip
    config = replace(CONFIG, num_gpu_blocks=60)
    _, lru = serve(requests + again, config=config)
    _, mru = serve(requests + again, eviction=Newest(), config=config)

    def hits(records: Any) -> int:
        return sum(record.cached_tokens for record in records.values())

    assert hits(lru) < hits(mru)  # a loop larger than the cache is LRU's worst case


def test_victim_and_displacement_and_limits_and_notices():
    heard: list[tuple[str, int, int]] = []
    admitted: list[int] = []

    @dataclass
    class Eager(SchedulingPolicy):
        """The newest goes first, and takes the place of the oldest."""

        order = "key"

        def key(self, request: Any, view: Any) -> Any:
            return -request.request.arrival_ns

        def displace(self, view: Any) -> Sequence[Any]:
            if view.waiting and len(view.running) == 1 and view.running[0].num_output_tokens:
                newest = view.waiting[0].request.arrival_ns
                return [s for s in view.running if s.request.arrival_ns < newest]
            return []

        def limits(self, view: Any) -> Limits:
            assert view.config is config
            return Limits(16, 1)

        def on_admit(self, request: Any, view: Any) -> None:
            admitted.append(request.request.uid)

        def on_tokens(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
            heard.append((tenant, prompt_tokens, output_tokens))

    config = replace(CONFIG, enable_prefix_caching=False)
    requests = [request(0, 0, 20, 8, tenant="a"), request(1, 4000, 10, 3, tenant="b")]
    engine, records = serve(requests, Eager(), config=config)
    assert records[0].preemptions == 1
    assert records[1].finish_ns < records[0].finish_ns
    assert admitted == [0, 1, 0]
    assert engine.log.table()["prefill_tokens"].max() <= 16
    assert sum(prompt for tenant, prompt, _ in heard if tenant == "a") == 40
    assert sum(output for tenant, _, output in heard if tenant == "a") == 8
    assert sum(output for tenant, _, output in heard if tenant == "b") == 3


def test_victim_is_the_policys_choice():
    class OldestGoes(SchedulingPolicy):
        def victim(self, view: Any) -> Any:
            return view.running[0]

    config = replace(CONFIG, num_gpu_blocks=9, scheduler_reserve_full_isl=False,
                     enable_prefix_caching=False)  # fmt: skip
    requests = [request(0, 0, 8, 12), request(1, 0, 8, 12)]
    _, usual = serve(requests, config=config)
    _, other = serve(requests, OldestGoes(), config=config)
    assert (usual[0].preemptions, usual[1].preemptions) == (0, 1)
    assert other[0].preemptions >= 1


class Spelled(SchedulingPolicy):
    """First come first served, spelled out step by step."""

    def plan(self, view: Any) -> Plan:
        budget, free = view.config.max_num_batched_tokens, view.num_free_blocks
        schedule: list[tuple[Any, int]] = []
        for r in view.running:
            n = min(r.num_tokens - r.num_computed_tokens, budget)
            schedule.append((r, n))
            budget -= n
            free -= view.blocks_needed(r, n)
        for r in view.waiting:
            n = min(r.num_tokens - view.cached_tokens(r), budget)
            free -= view.blocks_needed(r, n)
            if n < 1 or free < 0 or len(schedule) == view.config.max_num_seqs:
                break
            schedule.append((r, n))
            budget -= n
        return Plan(schedule)


def test_a_free_plan_is_carried_out():
    requests = workload()
    config = replace(CONFIG, num_gpu_blocks=400)
    usual, records = serve(requests, config=config)
    spelled, others = serve(requests, Spelled(), config=config)
    assert usual.log.table()["end_ns"].tolist() == spelled.log.table()["end_ns"].tolist()
    assert records == others


def nonsense(**plan: Any) -> SchedulingPolicy:
    class Nonsense(SchedulingPolicy):
        def plan(self, view: Any) -> Plan:
            return plan["make"](view)

    return Nonsense()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda view: Plan([(view.waiting[0], 0)]), "schedules 0 tokens"),
        (lambda view: Plan([(view.waiting[0], 11)]), "schedules 11 tokens"),
        (lambda view: Plan([(view.waiting[0], 5)] * 2), "twice"),
        (lambda view: Plan([(request(9, 0, 1, 1), 1)]), "neither waits nor runs"),
        (lambda view: Plan([], [view.waiting[0]]), "does not run"),
        (lambda view: Plan([]), "plans nothing"),
    ],
)
def test_a_plan_that_makes_no_sense_is_the_users_error(make, complaint):
    with pytest.raises(UserError, match=complaint):
        serve([request(0, 0, 10, 2)], nonsense(make=make))


def test_swapping_is_refused_for_now():
    with pytest.raises(UserError, match="preempt='swap'"):
        PlainEngine(CONFIG, StubCost(), declared(preempt="swap"))
