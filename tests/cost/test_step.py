"""The cost of a step: equal on every path, monotone, and of the published size."""

from __future__ import annotations

import numpy as np
import pytest

from sim.cost import build_cost_model
from sim.cost.hardware import gpu
from sim.cost.host import host_model
from sim.cost.interface import PARTS, StepShape, StepShapes
from sim.cost.models import model
from sim.cost.step import StepCost
from sim.engine.config import EngineConfig


def cost_of(model_name: str, gpu_name: str, **settings: object) -> StepCost:
    shape, card = model(model_name), gpu(gpu_name)
    engine = EngineConfig.for_gpu(card.name, card.memory_bytes, shape.context, settings)
    return build_cost_model(shape, card, engine)


CASES = {
    "dense": ("llama-3-8b", "a100-80g", {}),
    "sync": ("llama-3-8b", "a100-80g", {"async_scheduling": False}),
    "tp-moe": ("mixtral-8x7b", "h100", {"tensor_parallel_size": 2}),
    "sliding": ("mistral-7b-v0.1", "l40s", {}),
    "mla-ep": ("deepseek-v3", "h200", {"tensor_parallel_size": 8, "enable_expert_parallel": True}),
    "eager": ("opt-13b", "a100-40g", {"enforce_eager": True}),
}


@pytest.fixture(params=CASES, scope="module")
def cost(request: pytest.FixtureRequest) -> StepCost:
    model_name, gpu_name, settings = CASES[request.param]
    return cost_of(model_name, gpu_name, **settings)


def test_decode_run_equals_single_steps_exactly(cost: StepCost) -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        batch = int(rng.integers(1, 129))
        context = rng.integers(1, 1500, batch)
        total, squares = int(context.sum()), int((context**2).sum())
        run = cost.decode_run_ns(batch, total, squares, 40)
        for i in range(40):
            now = context + i
            shape = StepShape(batch, int(now.sum()), int((now**2).sum()), (), batch)
            assert run[i] == cost.step_ns(shape)


@pytest.mark.parametrize("count", [1, 7, 60])
def test_ends_of_a_run_are_its_steps_added_up(cost: StepCost, count: int) -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        batch = int(rng.integers(1, 120))
        contexts = rng.integers(1, 2000, batch)
        total, squares = int(contexts.sum()), int((contexts**2).sum())
        ends, now = [], 1000
        for i in range(count):
            grown = contexts + i
            shape = StepShape(batch, int(grown.sum()), int((grown**2).sum()), (), batch)
            now += cost.step_ns(shape)
            ends.append(now)
        assert cost.decode_ends(1000, batch, total, squares, count) == ends


def test_parts_sum_to_the_step(cost: StepCost) -> None:
    rng = np.random.default_rng(2)
    singles, columns, chunks = [], [], []
    for step in range(200):
        batch = int(rng.integers(0, 40))
        context = rng.integers(1, 1500, batch)
        count = int(rng.integers(0 if batch else 1, 4))
        prefills = [
            (int(rng.integers(1, 400)), int(rng.integers(0, 3) * 128)) for _ in range(count)
        ]
        shape = StepShape(
            batch, int(context.sum()), int((context**2).sum()), prefills, batch + count
        )
        singles.append(cost.step_ns(shape))
        columns.append(
            (batch, batch, shape.decode_context, shape.decode_context_sq, batch + count,
             shape.num_tokens)
        )  # fmt: skip
        chunks += [(step, q, p) for q, p in prefills]
    table = np.array(columns, dtype=np.int64).T
    flat = np.array(chunks, dtype=np.int64).T
    parts = cost.parts_s(StepShapes(*table, *flat))
    assert set(parts) == set(PARTS)
    total = sum(parts.values()) * 1e9
    assert np.abs(total - np.array(singles)).max() <= 1.0
    assert all((p >= 0).all() for p in parts.values())


def test_step_grows_with_batch_context_and_chunk(cost: StepCost) -> None:
    def decode(batch: int, context: int) -> int:
        return cost.step_ns(StepShape(batch, batch * context, batch * context**2, (), batch))

    def chunk(q: int, prefix: int) -> int:
        return cost.step_ns(StepShape(0, 0, 0, ((q, prefix),), 1))

    assert decode(1, 500) <= decode(16, 500) * 1.02 <= decode(128, 500) * 1.04
    assert decode(64, 100) <= decode(64, 1000) <= decode(64, 1900)
    assert chunk(64, 0) <= chunk(256, 0) * 1.02 <= chunk(1024, 0) * 1.04
    assert chunk(512, 0) <= chunk(512, 512) <= chunk(512, 1024)


def test_skewed_contexts_cost_more_than_equal_ones() -> None:
    cost = cost_of("llama-3-8b", "h100")
    equal = cost.step_ns(StepShape(64, 64 * 2000, 64 * 2000**2, (), 64))
    skewed = [500] * 56 + [12500] * 8
    assert sum(skewed) == 64 * 2000
    uneven = StepShape(64, sum(skewed), sum(c * c for c in skewed), (), 64)
    assert equal < cost.step_ns(uneven) < 1.3 * equal


def test_host_adds_when_synchronous_and_hides_when_not() -> None:
    shape = StepShape(32, 32 * 500, 32 * 500**2, (), 32)
    hidden = cost_of("llama-3-8b", "a100-80g").step_ns(shape)
    added = cost_of("llama-3-8b", "a100-80g", async_scheduling=False).step_ns(shape)
    host = host_model("0.33.0")
    expected = 1e3 * (host.sync_us + 32 * host.sync_per_seq_us)
    assert added - hidden == pytest.approx(expected, abs=1)
