"""Microseconds of single operator calls on one GPU, from its profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.cost import rooflines
from sim.cost.hardware import Gpu
from sim.cost.profile import Entry, Profile
from sim.cost.rooflines import Array, Roofline, Work

KERNEL_US = 2.0
"""Shortest time of a small kernel inside a CUDA graph (notes on the open deployments)."""
STREAM_EFFICIENCY = 0.8
"""Fraction of the memory bandwidth that elementwise kernels reach."""


@dataclass(frozen=True)
class Operator:
    """A fitted operator: the bounded p-norm roofline times exp(residual)."""

    roofline: Roofline
    dtype: str
    gpu: Gpu

    @classmethod
    def of(cls, fit: Mapping[str, Any], dtype: str, gpu: Gpu) -> Operator:
        return cls(Roofline(**fit["roofline"]), dtype, gpu)

    def us(self, work: Work) -> Array:
        return self.roofline.us(work, self.gpu, self.dtype)


class Predictor:
    """Predictions for one GPU. Arguments broadcast; results are microseconds per call."""

    def __init__(self, profile: Profile, gpu: Gpu) -> None:
        profile.require(gpu)
        self.profile = profile
        self.gpu = gpu
        self._chosen: dict[tuple[str, ...], Operator] = {}

    def gemm_us(self, m: npt.ArrayLike, n: int, k: int, dtype: str) -> Array:
        """x[m,k] w[k,n]; `dtype` is the weights' (`bf16`, `fp8`, `int4`, ...)."""
        chosen = self._operator("gemm", dtype)
        return chosen.us(rooflines.gemm(m, n, k, dtype))

    def prefill_us(
        self,
        q_len: npt.ArrayLike,
        prefix: npt.ArrayLike,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: str,
    ) -> Array:
        """Attention of one chunk of `q_len` tokens after `prefix` cached ones."""
        chosen = self._operator("prefill", "bf16", kv_dtype)
        work = rooflines.prefill(1, q_len, prefix, heads, kv_heads, head_dim, kv_dtype)
        return chosen.us(work)

    def decode_us(
        self,
        batch: npt.ArrayLike,
        kv_len: npt.ArrayLike,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: str,
    ) -> Array:
        """Attention of `batch` sequences, one new token each, `kv_len` tokens of KV each."""
        chosen = self._operator("decode", "bf16", kv_dtype)
        return chosen.us(rooflines.decode(batch, kv_len, heads, kv_heads, head_dim, kv_dtype))

    def moe_us(
        self,
        tokens: npt.ArrayLike,
        hidden: int,
        inter: int,
        topk: int,
        experts: int,
        tp: int,
        ep: int,
        dtype: str,
    ) -> Array:
        """Routed experts of one GPU under balanced routing; `tokens` counted over `ep` ranks."""
        chosen = self._operator("moe", dtype)
        return chosen.us(rooflines.moe(tokens, hidden, inter, topk, experts, tp, ep, dtype))

    def collective_us(self, op: str, size: npt.ArrayLike, world: int) -> Array:
        """`size` bytes over `world` GPUs of one node, inside a CUDA graph."""
        size = np.asarray(size, dtype=np.float64)
        if world == 1:
            return np.zeros_like(size)
        share = (world - 1) / world * (2 if op == "all_reduce" else 1)
        seconds = size * share / (0.75 * self.gpu.link_bytes_per_s)
        result: Array = seconds * 1e6 + 3.0 + 1.0 * np.log2(world)
        return result

    def elementwise_us(self, moved: npt.ArrayLike) -> Array:
        """One norm, rotary embedding, activation, ... that moves that many bytes."""
        moved = np.asarray(moved, dtype=np.float64)
        result: Array = KERNEL_US + moved * (1e6 / (STREAM_EFFICIENCY * self.gpu.bytes_per_s))
        return result

    @cached_property
    def sources(self) -> list[str]:
        """Which entries of the profile were used so far, for people."""
        return sorted("/".join(k) for k in self._chosen)

    def _operator(self, op: str, dtype: str, kv_dtype: str | None = None) -> Operator:
        key = (op, dtype, kv_dtype or "")
        if key not in self._chosen:
            entry = choose(self.profile.of(op), dtype, kv_dtype)
            self._chosen[key] = Operator.of(entry.fit, dtype, self.gpu)
        return self._chosen[key]


KERNEL_RANK = ("vllm", "sglang", "trtllm", "lls", "sarathi", "deepgemm")


def choose(entries: Iterable[Entry], dtype: str, kv_dtype: str | None) -> Entry:
    """The entry that describes vLLM best: same dtype if there is one, its kernels first."""
    wanted = {"fp16": "bf16"}.get(dtype, dtype)
    kv = {"fp16": "bf16"}.get(kv_dtype or "", kv_dtype)

    def badness(entry: Entry) -> tuple[int, ...]:
        key = entry.key
        engine = str(key.get("engine", ""))
        rank = next((i for i, e in enumerate(KERNEL_RANK) if engine.startswith(e)), 9)
        return (
            int(key.get("dtype", "bf16") not in (wanted, dtype)),
            int(kv is not None and key.get("kv_dtype") != kv),
            int(key.get("distribution", "balanced") != "balanced"),
            rank,
            -entry.points,
        )

    return min(entries, key=badness)
