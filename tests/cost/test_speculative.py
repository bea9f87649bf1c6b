"""The draft model's part of a step: limits, every path the same, memory, what a user sees."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from sim.cost import build_cost_model, plan_memory
from sim.cost.hardware import gpu
from sim.cost.interface import PARTS, StepShape, StepShapes
from sim.cost.models import model
from sim.cost.speculative import SpeculativeCost, with_draft
from sim.cost.step import StepCost
from sim.engine.config import EngineConfig
from sim.errors import UserError
from sim.run import simulate
from sim.scenario import Scenario
from sim.system import System

TARGET, DRAFT = "llama-3.1-8b", "llama-3.2-1b"


def target_of(
    k: int, gpu_name: str = "h100", host_zero: bool = True, **settings: object
) -> StepCost:
    card, shape = gpu(gpu_name), model(TARGET)
    settings = {"num_speculative_tokens": k, "spec_method": "draft_model", **settings}
    settings = {"max_num_batched_tokens": 4096, "max_num_seqs": 64, **settings}
    engine = EngineConfig.for_gpu(card.name, card.memory_bytes, 8192, settings)
    return build_cost_model(shape, card, engine, host_zero=host_zero)


def verification(batch: int, k: int, context: int) -> StepShape:
    tokens = batch * (1 + k)
    return StepShape(batch, batch * context, batch * context**2, (), batch, tokens)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_draft_as_large_as_the_target_costs_k_steps_more(k: int) -> None:
    target = target_of(k)
    cost = with_draft(target, model(TARGET))
    for batch in (1, 16):
        shape = verification(batch, k, 1000)
        verify = target.step_ns(shape)
        decode = target.step_ns(StepShape(batch, batch * 1000, batch * 1000**2, (), batch))
        assert 0.95 * (k + 1) * decode < cost.step_ns(shape) < 1.01 * (k + 1) * verify
        assert verify < 1.4 * decode  # so that the bounds are tight


def test_a_draft_of_no_cost_changes_nothing() -> None:
    target = target_of(3)
    free = with_draft(target, model(DRAFT))
    tables = free.draft.tables
    for table in (tables.linear, tables.moe, tables.comm, tables.head):
        table[:] = 0.0
    free.draft = StepCost(tables, free.draft.host, free.draft.frontend, {})
    free.draft._call = 0.0
    shape = StepShape(0, 0, 0, ((300, 0),), 0)
    attention = free.draft.step_ns(shape)
    assert free.step_ns(shape) == target.step_ns(shape) + attention
    assert attention < 0.02 * target.step_ns(shape)


def test_one_pass_covers_the_step_and_further_ones_one_token_each() -> None:
    one, four = (with_draft(target_of(k), model(DRAFT)) for k in (1, 4))
    shape = StepShape(8, 8 * 500, 8 * 500**2, ((700, 0), (200, 64)), 9, 8 * 5)
    draft = four.draft
    first = draft.step_ns(replace(shape, num_sampled=9 - (40 - 8)))
    context = [501] * 8 + [701]
    more = [
        draft.step_ns(StepShape(9, sum(now), sum(c * c for c in now), (), 9))
        for now in ([c + i for c in context] for i in range(3))
    ]
    assert four.step_ns(shape) == four.target.step_ns(shape) + first + sum(more)
    plain = StepShape(8, 8 * 500, 8 * 500**2, (), 8, 16)
    only = one.draft.step_ns(replace(plain, num_sampled=0))
    assert one.step_ns(plain) == one.target.step_ns(plain) + only


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("host_zero", [True, False])
def test_parts_and_runs_are_the_steps(asynchronous: bool, host_zero: bool) -> None:
    k = 3
    target = target_of(k, host_zero=host_zero, async_scheduling=asynchronous)
    cost = with_draft(target, model(DRAFT))
    rng = np.random.default_rng(4)
    singles, columns, chunks = [], [], []
    for step in range(150):
        batch = int(rng.integers(0, 30))
        context = rng.integers(1, 4000, batch)
        count = int(rng.integers(0 if batch else 1, 4))
        prefills = [(int(rng.integers(2, 400)), int(rng.integers(0, 300))) for _ in range(count)]
        sampled = batch + int(rng.integers(0, count + 1))
        tokens = batch * int(rng.integers(1, k + 2))
        squares = int((context**2).sum())
        shape = StepShape(batch, int(context.sum()), squares, prefills, sampled, tokens)
        singles.append(cost.step_ns(shape))
        columns.append((batch, tokens, shape.decode_context, squares, sampled, shape.num_tokens))
        chunks += [(step, q, p) for q, p in prefills]
    flat = np.array(chunks, dtype=np.int64).T
    parts = cost.parts_s(StepShapes(*np.array(columns, dtype=np.int64).T, *flat))
    assert set(parts) == set(PARTS)
    assert all((p >= 0).all() for p in parts.values())
    assert np.abs(sum(parts.values()) * 1e9 - np.array(singles)).max() <= k + 2
    run = cost.decode_run_ns(5, 5000, 5_100_000, 4)
    for i in range(4):
        squares = 5_100_000 + 2 * 5000 * i + 5 * i * i
        assert run[i] == cost.step_ns(StepShape(5, 5000 + 5 * i, squares, (), 5))


def test_the_host_works_while_the_draft_runs() -> None:
    """One sequence of a small model on a fast GPU: the host takes longer than the target."""
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    engine = EngineConfig.for_gpu(
        "H100-SXM", 80e9, 2048, {**small, "num_speculative_tokens": 1, "spec_method": "draft_model"}
    )
    target = build_cost_model(model("opt-125m"), gpu("h100"), engine)
    cost = with_draft(target, model("opt-125m"))
    shape = verification(1, 1, 100)
    busy = build_cost_model(model("opt-125m"), gpu("h100"), engine, host_zero=True).step_ns(shape)
    assert busy < target.step_ns(shape)
    passes = cost.draft.step_ns(replace(shape, num_sampled=0))
    assert cost.step_ns(shape) == max(target.step_ns(shape), busy + passes)


def test_a_copy_counts_for_itself() -> None:
    cost = with_draft(target_of(2), model(DRAFT))
    other = copy.copy(cost)
    other.step_ns(StepShape(0, 0, 0, ((4096, 4000),), 1))
    assert cost.draft._steps == cost.target._steps == 0
    assert isinstance(other, SpeculativeCost)
    assert other.draft._steps > 0


def test_the_draft_model_takes_memory() -> None:
    card, shape, draft = gpu("a100-80g"), model(TARGET), model(DRAFT)
    engine = EngineConfig.for_gpu(
        card.name, card.memory_bytes, 8192, {"num_speculative_tokens": 3, "spec_method": "eagle"}
    )
    alone = plan_memory(shape, card, engine)
    both = plan_memory(shape, card, engine, draft=draft)
    assert both.weights - alone.weights == pytest.approx(2 * draft.num_params, rel=0.01)
    per_token = shape.kv_bytes_per_token() + draft.kv_bytes_per_token()
    assert both.block_bytes == per_token * engine.block_size
    assert both.num_blocks == both.kv_bytes // both.block_bytes
    assert both.num_blocks < alone.num_blocks


def spec(**more: object) -> Scenario:
    engine = {"num_speculative_tokens": 3, "spec_method": "draft_model", **more}
    return Scenario.of(
        model=TARGET, gpu="h100", engine=engine, capacity_probe=False,
        generate="poisson:rate=2,n=20,prompt=200,output=50",
    )  # fmt: skip


def test_a_run_pays_for_the_draft_and_says_so() -> None:
    free = simulate(spec())
    paid = simulate(spec(spec_model=DRAFT))
    assert free.summary["tpot_s"]["mean"] < paid.summary["tpot_s"]["mean"]
    assert paid.summary["cost_model"]["draft_model"] == "Llama-3.2-1B"
    assert "draft_model" not in free.summary["cost_model"]
    told = [n for n in free.system.notes if "takes no time and no memory" in n]
    assert len(told) == 1
    assert "engine.spec_model" in told[0]
    assert not [n for n in paid.system.notes if "draft" in n]
    assert not [n for n in simulate(spec(spec_method="ngram")).system.notes if "draft" in n]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec_model": "opt-125m"}, "another vocabulary than Llama-3.1-8B"),
        ({"spec_model": "llama-3.2-1bb"}, "did you mean 'Llama-3.2-1B'"),
        ({"spec_model": DRAFT, "spec_method": "medusa"}, "spec_model is for spec_method draft_m"),
        ({"spec_model": DRAFT, "num_speculative_tokens": 0}, "needs num_speculative_tokens"),
    ],
)
def test_impossible_drafts_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        System.of(spec(**settings))
