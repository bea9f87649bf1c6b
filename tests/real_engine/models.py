"""Small models for the tests, each with another feature of the family."""

from __future__ import annotations

from dataclasses import replace

import torch

from calibrate.engine.architecture import Architecture
from calibrate.engine.weights import Weights, random_weights
from sim.cost.models import ModelShape, MoeShape

TINY = ModelShape(
    name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=199,
    context=256,
)  # fmt: skip
MOE = MoeShape(experts=8, topk=2, intermediate=48)

MODELS: dict[str, Architecture] = {
    "llama": Architecture(TINY, rope_theta=500000.0, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }),
    "qwen2": Architecture(replace(TINY, tied_embeddings=True, kv_heads=4), qkv_bias=True),
    "qwen3": Architecture(replace(TINY, qk_norm=True, kv_heads=1)),
    "mistral": Architecture(replace(TINY, sliding_window=24)),
    "mixtral": Architecture(replace(TINY, moe=MOE)),
    "qwen2_moe": Architecture(
        replace(TINY, moe=replace(MOE, topk=3, shared_intermediate=32)),
        qkv_bias=True, renormalise=False, shared_gate=True,
    ),
}  # fmt: skip


def weights(arch: Architecture, seed: int = 1) -> Weights:
    """fp32, so that the order of additions cannot change the most likely token."""
    return random_weights(arch, seed=seed, dtype=torch.float32)
