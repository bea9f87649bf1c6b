"""The operators with the kernels of `kernels/`: for NVIDIA GPUs, or Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from calibrate.engine.batch import Batch, Entry
from calibrate.engine.ops import HeadShape, LayerCache
from calibrate.engine.weights import Experts
from kernels.activation import silu_and_mul
from kernels.flash_prefill import flash_prefill
from kernels.fused_moe import fused_moe
from kernels.moe_router import Routing, route
from kernels.norm import rms_norm
from kernels.paged_attention import paged_decode
from kernels.rope import rope_and_cache


@dataclass(frozen=True)
class Requests:
    """Requests of one attention call."""

    block_table: torch.Tensor
    """[requests, blocks] int32"""
    seq_lens: torch.Tensor
    """[requests] int32"""
    max_seq_len: int
    query_start: torch.Tensor | None
    """[requests + 1] int32; None: one token each."""
    max_query_len: int


@dataclass(frozen=True)
class TritonPlan:
    decodes: Requests | None
    prefills: Requests | None
    num_decode_tokens: int
    window: int | None


class TritonOps:
    """Implements `calibrate.engine.ops.Ops`."""

    def plan(self, batch: Batch, heads: HeadShape, block_size: int) -> TritonPlan:
        device = batch.token_ids.device
        decodes, prefills = batch.decodes, batch.prefills
        return TritonPlan(
            _requests(decodes, block_size, device) if decodes else None,
            _requests(prefills, block_size, device, chunks=True) if prefills else None,
            batch.num_decode_tokens,
            heads.window,
        )

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return rms_norm(x, weight, eps), x
        return rms_norm(x, weight, eps, residual=residual), residual

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
        split = qkv.view(qkv.shape[0], heads.heads + 2 * heads.kv_heads, heads.dim)
        query: torch.Tensor
        query, key, value = split.split((heads.heads, heads.kv_heads, heads.kv_heads), dim=1)
        if norms is not None:
            q_weight, k_weight, eps = norms
            rms_norm(query, q_weight, eps, out=query)
            rms_norm(key, k_weight, eps, out=key)
        rope_and_cache(query, key, value, cos_sin, positions, cache.k, cache.v, slots)
        return query

    def decode(
        self, query: torch.Tensor, cache: LayerCache, plan: TritonPlan, out: torch.Tensor
    ) -> None:
        if plan.decodes is None:
            return
        r, tokens = plan.decodes, slice(0, plan.num_decode_tokens)
        paged_decode(
            query[tokens],
            cache.k,
            cache.v,
            r.block_table,
            r.seq_lens,
            r.max_seq_len,
            window=plan.window,
            query_start=r.query_start,
            max_query_len=r.max_query_len,
            out=out[tokens],
        )

    def prefill(
        self, query: torch.Tensor, cache: LayerCache, plan: TritonPlan, out: torch.Tensor
    ) -> None:
        r = plan.prefills
        if r is None or r.query_start is None:
            return
        tokens = slice(plan.num_decode_tokens, None)
        flash_prefill(
            query[tokens],
            cache.k,
            cache.v,
            r.query_start,
            r.max_query_len,
            block_table=r.block_table,
            seq_lens=r.seq_lens,
            window=plan.window,
            out=out[tokens],
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = silu_and_mul(gate_up)
        return product

    def experts(
        self, x: torch.Tensor, experts: Experts, topk: int, renormalise: bool
    ) -> torch.Tensor:
        logits = F.linear(x, experts.router, experts.bias)
        routing = route(logits, topk, renormalize=renormalise)
        result: torch.Tensor = fused_moe(x, experts.gate_up, experts.down, routing)
        return result

    def grouped(
        self, x: torch.Tensor, experts: Experts, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        routing = Routing(weights, chosen.to(torch.int32), None, None)
        result: torch.Tensor = fused_moe(x, experts.gate_up, experts.down, routing)
        return result


def _requests(
    entries: Sequence[Entry], block_size: int, device: torch.device, *, chunks: bool = False
) -> Requests:
    lengths = [len(e.tokens) for e in entries]
    longest = max(e.end for e in entries)
    # Drafts past the longest context have no block of their own: their table ends in block 0.
    # Rows of whole 64 bytes, so that the kernels see aligned tables whatever the context.
    width = -(-longest // (16 * block_size)) * 16
    table = [[*e.blocks[:width], *[0] * (width - len(e.blocks))] for e in entries]
    starts = None
    if chunks or max(lengths) > 1:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
    return Requests(
        block_table=torch.tensor(table, dtype=torch.int32).to(device, non_blocking=True),
        seq_lens=torch.tensor([e.end for e in entries], dtype=torch.int32).to(device),
        max_seq_len=longest,
        query_start=starts,
        max_query_len=max(lengths),
    )
