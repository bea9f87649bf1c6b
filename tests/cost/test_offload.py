"""Host time of KV offloading: futile stores, equal on all paths."""

from __future__ import annotations

import numpy as np
import pytest

from sim.cost import build_cost_model
from sim.cost.hardware import gpu
from sim.cost.interface import PARTS, StepShape, StepShapes
from sim.cost.models import model
from sim.cost.offload import OffloadingCost, StoreRetries, cpu_blocks
from sim.cost.step import StepCost
from sim.engine.config import EngineConfig


@pytest.fixture(scope="module")
def plain() -> StepCost:
    config = EngineConfig(max_num_seqs=128, num_gpu_blocks=30000, max_model_len=4096)
    return build_cost_model(model("llama-3.1-8b"), gpu("h100"), config, engine_version="0.15.1")


def decodes(batch: int, context: int) -> StepShape:
    return StepShape(batch, batch * context, batch * context**2, (), batch)


def test_nothing_changes_while_all_blocks_fit(plain: StepCost) -> None:
    cost = OffloadingCost(plain, cpu_blocks=4096)
    shape = decodes(64, 1000)  # 4000 blocks
    assert cost.step_ns(shape) == plain.step_ns(shape)


def test_futile_stores_make_the_host_the_slower_one(plain: StepCost) -> None:
    retries = StoreRetries(us_per_cpu_block=0.08, us_per_try=25.0, share_waiting=0.0)
    cost = OffloadingCost(plain, cpu_blocks=4096, retries=retries)
    shape = decodes(128, 2048)  # four times what fits: three of four requests try in vain
    host_us = plain.host.async_us + 128 * plain.host.async_per_seq_us
    stall_us = 0.75 * 128 * (25 + 0.08 * 4096)
    assert cost.step_ns(shape) == pytest.approx((host_us + stall_us) * 1e3, abs=2)
    assert cost.step_ns(shape) > plain.step_ns(shape)


def test_a_run_of_decodes_equals_its_steps(plain: StepCost) -> None:
    cost = OffloadingCost(plain, cpu_blocks=1000)
    batch, context, n = 40, 380, 60  # crosses from fitting to not fitting
    squares = batch * context**2
    run = cost.decode_run_ns(batch, batch * context, squares, n)
    steps = [
        cost.step_ns(
            StepShape(
                batch,
                batch * (context + i),
                squares + 2 * i * batch * context + batch * i * i,
                (),
                batch,
            )
        )
        for i in range(n)
    ]
    assert run.tolist() == steps


def test_parts_sum_to_the_step(plain: StepCost) -> None:
    cost = OffloadingCost(plain, cpu_blocks=3000)
    column = {
        name: np.array(values, dtype=np.int64)
        for name, values in {
            "num_decodes": [4, 100],
            "decode_tokens": [4, 100],
            "decode_context": [4000, 150_000],
            "decode_context_sq": [4_000_000, 225_000_000],
            "num_sampled": [4, 101],
            "num_tokens": [4, 164],
            "chunk_step": [1],
            "chunk_tokens": [64],
            "chunk_prefix": [512],
        }.items()
    }
    parts = cost.parts_s(StepShapes(**column))
    total = sum(parts[name] for name in PARTS)
    expected = [
        cost.step_ns(StepShape(4, 4000, 4_000_000, (), 4)),
        cost.step_ns(StepShape(100, 150_000, 225_000_000, [(64, 512)], 101)),
    ]
    assert np.asarray(total) * 1e9 == pytest.approx(expected, abs=2)
    assert parts["host"][1] > 0


def test_cpu_blocks_of_published_servers() -> None:
    # Llama-2-7B with 8 GiB: 1023 blocks in the published logs (one of 1024 is kept).
    per_token = model("llama-2-7b").kv_bytes_per_token("fp16")
    assert cpu_blocks(per_token, 16) == 1024
