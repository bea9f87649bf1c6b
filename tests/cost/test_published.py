"""Decode steps against what real deployments showed, and names of derived profiles."""

from __future__ import annotations

import pytest

from sim.cost import build_cost_model
from sim.cost.hardware import catalogue, gpu
from sim.cost.interface import StepShape
from sim.cost.models import model
from sim.cost.profile import for_gpu, shipped_names
from sim.cost.step import StepCost
from sim.engine.config import EngineConfig

CONTEXT = 715
"""Mean context of the `general` deployments: 590 prompt tokens and half of 248 output tokens."""

# (model, GPU, tp, decodes, measured ms per token), vLLM 0.15; ground_truth/experiments_open.json.
DEPLOYED = [
    ("Llama-2-7B", "h100", 1, 16, 8.22),
    ("Llama-2-7B", "h100", 1, 82, 16.62),
    ("Llama-3.1-8B", "h100", 1, 15, 7.56),
    ("Llama-3.1-8B", "h100", 1, 45, 8.93),
    ("CodeLlama-34B", "h100", 2, 29, 14.77),
    ("CodeLlama-34B", "h100", 2, 84, 17.00),
    ("Llama-2-70B", "h100", 4, 37, 18.71),
    ("Llama-2-70B", "h100", 4, 109, 22.09),
    ("Mixtral-8x7B", "h100", 2, 27, 18.48),
    ("Mixtral-8x7B", "h100", 2, 101, 20.48),
    ("Llama-3.1-8B", "a100-80g", 1, 8, 12.25),
    ("Llama-2-70B", "a100-80g", 4, 20, 32.13),
    ("Llama-3.1-8B", "l40s", 1, 16, 25.36),
]


def step_ms(cost: StepCost, decodes: int, context: int = CONTEXT) -> float:
    shape = StepShape(decodes, decodes * context, decodes * context**2, (), decodes)
    return cost.step_ns(shape) / 1e6


@pytest.mark.parametrize(("name", "card", "tp", "decodes", "measured"), DEPLOYED)
def test_decode_step_is_the_measured_one(
    name: str, card: str, tp: int, decodes: int, measured: float
) -> None:
    engine = EngineConfig(
        tensor_parallel_size=tp, max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=4096
    )
    cost = build_cost_model(model(name), gpu(card), engine, engine_version="0.15.1")
    # Steps with a chunk (a tenth to a third of them) add up to 6 % on top.
    assert step_ms(cost, decodes) == pytest.approx(measured, rel=0.07)


def test_mixed_step_is_dear_with_flash_attention_2_and_cheap_with_3() -> None:
    """About 100 us per layer more on A100, under 20 on H100 (notes on the open deployments)."""
    engine = EngineConfig(max_num_seqs=128, max_model_len=4096)
    extra = {}
    for card in ("a100-80g", "h100"):
        cost = build_cost_model(model("llama-3.1-8b"), gpu(card), engine, engine_version="0.15.1")
        alone = StepShape(21, 21 * CONTEXT, 21 * CONTEXT**2, (), 21)
        mixed = StepShape(21, 21 * CONTEXT, 21 * CONTEXT**2, ((8, 560),), 22)
        extra[card] = (cost.step_ns(mixed) - cost.step_ns(alone)) / 32 / 1e3
    assert 60 < extra["a100-80g"] < 180
    assert 0 <= extra["h100"] < 20


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_gpu_has_a_profile_and_says_whose(name: str) -> None:
    card = gpu(name)
    profile = for_gpu(card)
    if name in shipped_names():
        assert profile.label == name
    else:
        assert profile.label.startswith(f"{name} (datasheet, efficiencies of ")
    engine = EngineConfig(max_num_seqs=64, max_model_len=2048, tensor_parallel_size=2)
    cost = build_cost_model(model("llama-3-8b"), card, engine)
    assert 0.5 < step_ms(cost, 8, 500) < 60
    assert cost.describe()["profile"] == profile.label


def test_faster_memory_gives_faster_decodes() -> None:
    engine = EngineConfig(max_num_seqs=64, max_model_len=4096)
    times = [
        step_ms(build_cost_model(model("llama-3-8b"), gpu(card), engine), 32)
        for card in ("l4", "l40s", "a100-80g", "h100", "h200", "b200")
    ]
    assert times == sorted(times, reverse=True)


def test_eager_steps_wait_for_their_launches() -> None:
    graphs = EngineConfig(max_num_seqs=64, max_model_len=4096)
    eager = EngineConfig(max_num_seqs=64, max_model_len=4096, enforce_eager=True)
    quick = step_ms(build_cost_model(model("llama-3-8b"), gpu("h100"), graphs), 1)
    slow = step_ms(build_cost_model(model("llama-3-8b"), gpu("h100"), eager), 1)
    assert 1.3 * quick < slow < 2.5 * quick


def test_extrapolation_is_counted() -> None:
    engine = EngineConfig(max_num_seqs=64, max_model_len=200_000, max_num_batched_tokens=4096)
    cost = build_cost_model(model("llama-3.1-8b"), gpu("h100"), engine)
    step_ms(cost, 8, 4_000)
    assert cost.describe()["extrapolated_fraction"] == 0
    step_ms(cost, 1, 190_000)
    assert cost.describe()["extrapolated_fraction"] == pytest.approx(0.5)
