"""The decoder's weights as tensors: their layout, and random ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from calibrate.engine.architecture import Architecture

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Experts:
    """A router and its experts. [n, k] matrices multiply as `x @ w.T`."""

    router: torch.Tensor
    """[experts, hidden]"""
    gate_up: torch.Tensor
    """[experts, 2 * width, hidden]: first the gates, then the ups"""
    down: torch.Tensor
    """[experts, hidden, width]"""
    bias: torch.Tensor | None = None
    """[experts], added to the router's logits: what makes random routing skewed."""
    shared_gate_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None
    """[1, hidden]"""


@dataclass(frozen=True)
class Layer:
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """[(heads + 2 * kv_heads) * head_dim, hidden]"""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor | None
    down: torch.Tensor | None
    experts: Experts | None


@dataclass(frozen=True)
class Weights:
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def random_weights(
    arch: Architecture,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    routing_skew: float = 0.6,
) -> Weights:
    """Weights that keep activations at unit scale, so that logits and routing depend on the text.

    `routing_skew` is the spread of a fixed preference of the router among the experts, in units
    of the spread of its logits from token to token; 0 is uniform routing. Real routers sit near
    0.5 to 1: some experts get a few times the mean load, and it depends on the layer.
    """
    shape = arch.shape
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, std: float) -> torch.Tensor:
        made = torch.empty(size, dtype=dtype, device=device)
        return made.normal_(0.0, std, generator=generator)

    def matrix(*size: int) -> torch.Tensor:
        return normal(*size, std=size[-1] ** -0.5)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    def experts() -> Experts | None:
        moe = shape.moe
        if moe is None:
            return None
        shared = moe.shared_intermediate
        return Experts(
            router=matrix(moe.experts, shape.hidden),
            gate_up=matrix(moe.experts, 2 * moe.intermediate, shape.hidden),
            down=matrix(moe.experts, shape.hidden, moe.intermediate),
            bias=normal(moe.experts, std=routing_skew) if routing_skew else None,
            shared_gate_up=matrix(2 * shared, shape.hidden) if shared else None,
            shared_down=matrix(shape.hidden, shared) if shared else None,
            shared_gate=matrix(1, shape.hidden) if shared and arch.shared_gate else None,
        )

    def layer() -> Layer:
        q_rows = shape.heads * shape.head_dim
        rows = q_rows + 2 * shape.kv_heads * shape.head_dim
        dense = shape.moe is None
        return Layer(
            attention_norm=ones(shape.hidden),
            qkv=matrix(rows, shape.hidden),
            qkv_bias=normal(rows, std=0.1) if arch.qkv_bias else None,
            q_norm=ones(shape.head_dim) if shape.qk_norm else None,
            k_norm=ones(shape.head_dim) if shape.qk_norm else None,
            o=matrix(shape.hidden, q_rows),
            mlp_norm=ones(shape.hidden),
            gate_up=matrix(2 * shape.intermediate, shape.hidden) if dense else None,
            down=matrix(shape.hidden, shape.intermediate) if dense else None,
            experts=experts(),
        )

    embedding = normal(shape.vocab, shape.hidden, std=1.0)
    return Weights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(shape.layers)),
        norm=ones(shape.hidden) * (shape.hidden**-0.5 if shape.tied_embeddings else 1.0),
        lm_head=embedding if shape.tied_embeddings else matrix(shape.vocab, shape.hidden),
    )
