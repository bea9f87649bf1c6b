"""What calls cost inside a model's step, where that differs from how they were timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.cost import build_cost_model
from sim.cost.hardware import gpu
from sim.cost.interface import StepShape
from sim.cost.models import model
from sim.cost.predictor import STREAM_SHARE, STREAM_US, Predictor
from sim.cost.profile import for_gpu
from sim.cost.sampling import sorts_for_top_p
from sim.cost.step import StepCost
from sim.engine.config import EngineConfig


def test_a_decode_call_lasts_no_longer_than_reading_its_kv() -> None:
    h100 = gpu("h100")
    predictor = Predictor(for_gpu(h100), h100)
    batch = np.array([8.0, 22.0, 82.0, 128.0])
    us = predictor.decode_us(batch, 715, 32, 32, 128, "bf16")
    stream = batch * 715 * 32 * 128 * 4 / (STREAM_SHARE * h100.bytes_per_s) * 1e6
    assert (us <= STREAM_US + stream + 1e-9).all()
    assert (us > 0.8 * stream).all()


@pytest.mark.parametrize(
    ("version", "sorts"),
    [
        ((0, 11, 0), False),
        ((0, 11, 1), True),
        ((0, 15, 1), True),
        ((0, 17), False),
        ((0, 33), False),
    ],
)
def test_top_p_sorts_in_some_versions(version: tuple[int, ...], sorts: bool) -> None:
    assert sorts_for_top_p(version) is sorts


def step(version: str, top_p: bool, batch: int) -> int:
    shape = replace(model("llama-3.1-8b"), top_p=top_p)
    config = EngineConfig(max_num_seqs=128, num_gpu_blocks=30000, max_model_len=4096)
    cost = build_cost_model(shape, gpu("h100"), config, engine_version=version)
    return cost.step_ns(StepShape(batch, batch * 500, batch * 500**2, (), batch))


def test_sorting_costs_by_vocabulary_and_sequences() -> None:
    few, many = (step("0.15.1", True, n) - step("0.15.1", False, n) for n in (16, 64))
    assert 0.3e6 < few < 1.0e6
    assert many > few
    assert step("0.33.0", True, 16) == step("0.33.0", False, 16)


def test_gddr_cards_reach_more_of_their_bandwidth_than_the_hbm_card_they_borrow_from() -> None:
    def products_ms(name: str) -> float:
        card = gpu(name)
        config = EngineConfig(max_num_seqs=16, num_gpu_blocks=1000, max_model_len=2048)
        cost = build_cost_model(model("llama-3.1-8b"), card, config)
        assert isinstance(cost, StepCost)
        return float(cost.tables.linear[16]) * card.bandwidth

    assert products_ms("a6000") < 0.97 * products_ms("a100-80g")
