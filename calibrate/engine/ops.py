"""What the decoder asks of a device: the operators between its matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from calibrate.engine.batch import Batch
from calibrate.engine.weights import Experts


class Recorder(Protocol):
    """Is told, after each operator, which one has just been issued."""

    def mark(self, operator: str) -> None: ...


class NoRecorder:
    """Records nothing."""

    def mark(self, operator: str) -> None:
        return None


@dataclass(frozen=True)
class HeadShape:
    """Attention heads of one layer."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it."""

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, [blocks, block_size, kv_heads, dim] each."""

    k: torch.Tensor
    v: torch.Tensor


class Ops(Protocol):
    """The operators of one device. Shapes: T tokens, H heads, D head dimension."""

    def plan(self, batch: Batch, heads: HeadShape, block_size: int) -> Any:
        """What `decode` and `prefill` need to know of a batch, made once per step."""
        ...

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(RMSNorm(x + residual) * weight, x + residual), both [T, hidden]."""
        ...

    def rope_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        cache: LayerCache,
        heads: HeadShape,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        """Rotate queries and keys of `qkv` [T, (H + 2 KV) D], write keys and values into the
        cache, return the queries [T, H, D]. `cos_sin` is [positions, D] fp32: D/2 cosines, then
        D/2 sines. `norms` (q weight, k weight, eps): per-head RMSNorm before the rotation."""
        ...

    def decode(self, query: torch.Tensor, cache: LayerCache, plan: Any, out: torch.Tensor) -> None:
        """Attention of the batch's decode tokens, into the first rows of `out` [T, H, D]."""
        ...

    def prefill(self, query: torch.Tensor, cache: LayerCache, plan: Any, out: torch.Tensor) -> None:
        """Attention of the batch's chunks, into the other rows of `out`."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU(first half) * second half, [T, width]."""
        ...

    def experts(
        self, x: torch.Tensor, experts: Experts, topk: int, renormalise: bool
    ) -> torch.Tensor:
        """Routed experts (without shared ones) of [T, hidden]."""
        ...

    def grouped(
        self, x: torch.Tensor, experts: Experts, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """The same once the router has spoken: `weights` fp32 and `chosen` experts, [T, topk]."""
        ...
