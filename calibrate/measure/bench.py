"""The calls that points stand for, on tensors of this device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from calibrate.engine.batch import Entry, make_batch
from calibrate.engine.device import ops_for
from calibrate.engine.ops import HeadShape, LayerCache
from calibrate.engine.weights import DTYPES, Experts
from calibrate.measure.points import Point
from calibrate.timing import Call, Timing, measure

COLD_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}
"""Inputs used in turn reach this size together, so that they do not stay in the last-level cache
of a GPU; a CPU's traffic does reuse its cache, so there only the nearer caches are overrun."""
MOST_COPIES = 8
BLOCK_SIZE = 16


class Bench:
    """Times points on one device. Keeps no tensors between points."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.ops = ops_for(device)
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._rng = np.random.default_rng(seed)

    @torch.inference_mode()
    def time(self, point: Point, budget_s: float = 0.1) -> Timing:
        """Raises torch's out-of-memory error when the point does not fit."""
        make = self._builder(point)
        call, size = make()
        wanted = math.ceil(COLD_BYTES[self.device.type] / max(size, 1))
        calls = [call, *(make()[0] for _ in range(min(wanted, MOST_COPIES) - 1))]
        return measure(calls, self.device, budget_s=budget_s, warm_up_s=budget_s / 3)

    @torch.inference_mode()
    def call(self, point: Point) -> Call:
        """The point's call, on inputs of its own."""
        return torch.inference_mode()(self._builder(point)()[0])

    def _builder(self, point: Point) -> Callable[[], tuple[Call, int]]:
        build: Callable[[Point], Callable[[], tuple[Call, int]]] = {
            "gemm": self._gemm,
            "attn_prefill": self._prefill,
            "attn_decode": self._decode,
            "moe": self._moe,
            "elementwise": self._elementwise,
        }[point.op]
        return build(point)

    def kernel(self, point: Point) -> str:
        """What runs the point here, for its row."""
        if point.op == "gemm":
            return "cublas" if self.device.type == "cuda" else "onednn"
        if self.device.type != "cuda":
            return "torch"
        return {"attn_prefill": "flash_prefill", "attn_decode": "paged_decode",
                "moe": "fused_moe"}.get(point.op, "triton")  # fmt: skip

    # Each builder returns a function that makes one call on new tensors, and the bytes it touches.

    def _gemm(self, point: Point) -> Callable[[], tuple[Call, int]]:
        m, n, k, dtype = point["m"], point["n"], point["k"], DTYPES[point["dtype"]]

        def make() -> tuple[Call, int]:
            x, w = self._normal(m, k, dtype=dtype), self._normal(n, k, dtype=dtype)
            return (lambda: F.linear(x, w)), (m * k + n * k + m * n) * dtype.itemsize

        return make

    def _prefill(self, point: Point) -> Callable[[], tuple[Call, int]]:
        batch, q, prefix = point["batch"], point["q_len"], point["prefix"]
        return self._attention(point, [(prefix, q)] * batch)

    def _decode(self, point: Point) -> Callable[[], tuple[Call, int]]:
        return self._attention(point, [(point["kv_len"] - 1, 1)] * point["batch"])

    def _attention(
        self, point: Point, sequences: list[tuple[int, int]]
    ) -> Callable[[], tuple[Call, int]]:
        """`sequences`: (cached tokens, query tokens) of each."""
        heads = HeadShape(point["heads"], point["kv_heads"], point["head_dim"])
        dtype = DTYPES[point["dtype"]]
        each = [-(-(start + q) // BLOCK_SIZE) for start, q in sequences]
        decode = point.op == "attn_decode"

        def make() -> tuple[Call, int]:
            # As in a cache that has been in use: neighbours in a text are not neighbours in memory.
            shuffled = self._rng.permutation(sum(each)) + 1
            tables = np.split(shuffled, np.cumsum(each)[:-1])
            entries = [
                Entry([0] * q, start, table.tolist(), 1 if decode else 0)
                for (start, q), table in zip(sequences, tables, strict=True)
            ]
            made = make_batch(entries, BLOCK_SIZE, self.device)
            plan = self.ops.plan(made, heads, BLOCK_SIZE)
            size = (sum(each) + 1, BLOCK_SIZE, heads.kv_heads, heads.dim)
            cache = LayerCache(self._normal(*size, dtype=dtype), self._normal(*size, dtype=dtype))
            query = self._normal(made.num_tokens, heads.heads, heads.dim, dtype=dtype)
            out = torch.empty_like(query)
            run = self.ops.decode if decode else self.ops.prefill
            return (lambda: run(query, cache, plan, out)), cache.k.nbytes * 2 + query.nbytes * 2

        return make

    def _moe(self, point: Point) -> Callable[[], tuple[Call, int]]:
        dtype = DTYPES[point["dtype"]]
        count, hidden = point["experts"] // point["ep"], point["hidden"]
        width = point["inter"] // point["tp"]
        experts = Experts(
            router=self._normal(count, hidden, dtype=dtype),
            gate_up=self._normal(count, 2 * width, hidden, dtype=dtype),
            down=self._normal(count, hidden, width, dtype=dtype),
        )

        def make() -> tuple[Call, int]:
            # The weights are shared by all copies: they exceed any cache themselves.
            x = self._normal(point["tokens"], hidden, dtype=dtype)
            chosen = self._choose(point, count)
            weights = torch.full(chosen.shape, 1.0 / point["topk"], device=self.device)
            return (lambda: self.ops.grouped(x, experts, weights, chosen)), COLD_BYTES["cuda"] // 4

        return make

    def _choose(self, point: Point, count: int) -> torch.Tensor:
        """[tokens, topk] experts: all equally often, or by a power law of their rank."""
        tokens, topk = point["tokens"], point["topk"]
        if point["distribution"] == "balanced":
            turns = (np.arange(tokens * topk) % count).reshape(tokens, topk)
            chosen = (turns + self._rng.integers(count)) % count
        else:
            popularity = np.arange(1, count + 1) ** -1.2
            noise = np.log(popularity) + self._rng.gumbel(size=(tokens, count))
            chosen = np.argpartition(-noise, topk - 1, axis=1)[:, :topk]
        return torch.as_tensor(chosen, dtype=torch.int64).to(self.device)

    def _elementwise(self, point: Point) -> Callable[[], tuple[Call, int]]:
        tokens, dim, dtype = point["tokens"], point["dim"], torch.bfloat16
        kind = point["op"]

        def make() -> tuple[Call, int]:
            if kind == "act":
                x = self._normal(tokens, 2 * dim, dtype=dtype)
                return (lambda: self.ops.silu_mul(x)), x.nbytes
            if kind == "norm":
                x, residual = (self._normal(tokens, dim, dtype=dtype) for _ in range(2))
                weight = self._normal(dim, dtype=dtype)
                return (lambda: self.ops.add_norm(x, residual, weight, 1e-6)), 2 * x.nbytes
            return self._rope(tokens, dim, dtype)

        return make

    def _rope(self, tokens: int, dim: int, dtype: torch.dtype) -> tuple[Call, int]:
        head = 64 if dim % 128 else 128
        heads = HeadShape(max(1, dim // head - 2), 1, head)
        qkv = self._normal(tokens, (heads.heads + 2) * head, dtype=dtype)
        size = (-(-tokens // BLOCK_SIZE) + 1, BLOCK_SIZE, 1, head)
        cache = LayerCache(*(torch.zeros(size, dtype=dtype, device=self.device) for _ in "kv"))
        at = torch.arange(tokens, device=self.device)
        table = torch.zeros((tokens, head), device=self.device)
        return (
            lambda: self.ops.rope_write(qkv, at, table, at + BLOCK_SIZE, cache, heads, None)
        ), qkv.nbytes

    def _normal(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(size, dtype=dtype, device=self.device)
        return made.normal_(0.0, 1.0, generator=self._generator)


def measured_peaks(device: torch.device, budget_s: float = 0.3) -> dict[str, Any]:
    """What the device reaches in the two simplest things: a copy, and a large bf16 product."""
    cuda = device.type == "cuda"
    elements, side = (1 << 29, 8192) if cuda else (1 << 24, 512)
    source = torch.empty(elements, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    copy = measure([lambda: target.copy_(source)], device, budget_s=budget_s)
    product = measure([lambda: torch.mm(a, b)], device, budget_s=budget_s)
    return {
        "copy_gb_s": 2 * source.nbytes / copy.us / 1e3,
        "product_tflops": 2 * side**3 / product.us / 1e6,
        "noisy": "; ".join(t.noisy for t in (copy, product) if t.noisy),
    }
