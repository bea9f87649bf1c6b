"""The operators in plain torch, for any device; made to be quick on a CPU with one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from calibrate.engine.batch import Batch, Chunk, DecodeGroup, Entry
from calibrate.engine.ops import HeadShape, LayerCache
from calibrate.engine.weights import Experts

PADDING_TOKENS = 512
"""Padded keys that cost about as much as one more attention call on a CPU."""


@dataclass(frozen=True)
class TorchPlan:
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    masks: tuple[torch.Tensor | None, ...]
    """Per chunk [1, 1, length, context] bool; None: plain causal without prefix."""
    heads: HeadShape


class TorchOps:
    """Implements `calibrate.engine.ops.Ops`."""

    def plan(self, batch: Batch, heads: HeadShape, block_size: int) -> TorchPlan:
        device = batch.token_ids.device
        groups, first = [], 0
        for run in _similar(batch.decodes):
            group = _decode_group(run, first, heads, block_size, device)
            groups.append(group)
            first += group.requests * group.query
        chunks, masks = [], []
        for entry in batch.prefills:
            blocks = torch.tensor(entry.blocks[: -(-entry.end // block_size)], dtype=torch.int64)
            chunks.append(Chunk(first, len(entry.tokens), entry.start, blocks.to(device)))
            masks.append(_chunk_mask(entry, heads.window, device))
            first += len(entry.tokens)
        return TorchPlan(tuple(groups), tuple(chunks), tuple(masks), heads)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return F.rms_norm(total, weight.shape, weight, eps), total

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
        tokens, rotated = qkv.shape[0], heads.heads + heads.kv_heads
        split = qkv.view(tokens, rotated + heads.kv_heads, heads.dim)
        qk, value = split[:, :rotated], split[:, rotated:]
        if norms is not None:
            q_weight, k_weight, eps = norms
            qk = torch.cat(
                (
                    F.rms_norm(qk[:, : heads.heads], (heads.dim,), q_weight, eps),
                    F.rms_norm(qk[:, heads.heads :], (heads.dim,), k_weight, eps),
                ),
                dim=1,
            )
        half = heads.dim // 2
        turn = cos_sin[positions][:, None]
        cos, sin = turn[..., :half], turn[..., half:]
        low, high = qk[..., :half].float(), qk[..., half:].float()
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(qkv.dtype)
        cache.k.view(-1, heads.kv_heads, heads.dim)[slots] = turned[:, heads.heads :]
        cache.v.view(-1, heads.kv_heads, heads.dim)[slots] = value
        return turned[:, : heads.heads]

    def decode(
        self, query: torch.Tensor, cache: LayerCache, plan: TorchPlan, out: torch.Tensor
    ) -> None:
        heads = plan.heads
        for g in plan.groups:
            tokens = slice(g.first, g.first + g.requests * g.query)
            # The query heads of one KV head are rows of one product: [B, KV, query * group, D].
            q = query[tokens].view(g.requests, g.query, heads.kv_heads, heads.group, heads.dim)
            q = q.transpose(1, 2).reshape(g.requests, heads.kv_heads, -1, heads.dim)
            k, v = (_gather(c, g.blocks, g.requests) for c in (cache.k, cache.v))
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=g.hidden)
            o = o.view(g.requests, heads.kv_heads, g.query, heads.group, heads.dim)
            out[tokens] = o.transpose(1, 2).reshape(-1, heads.heads, heads.dim)

    def prefill(
        self, query: torch.Tensor, cache: LayerCache, plan: TorchPlan, out: torch.Tensor
    ) -> None:
        for c, mask in zip(plan.chunks, plan.masks, strict=True):
            tokens = slice(c.first, c.first + c.length)
            end = c.prefix + c.length
            k, v = (_gather(t, c.blocks, 1)[:, :, :end] for t in (cache.k, cache.v))
            o = F.scaled_dot_product_attention(
                query[tokens].transpose(0, 1)[None],
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            out[tokens] = o[0].transpose(0, 1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def experts(
        self, x: torch.Tensor, experts: Experts, topk: int, renormalise: bool
    ) -> torch.Tensor:
        return self.grouped(x, experts, *route(x, experts, topk, renormalise))

    def grouped(
        self, x: torch.Tensor, experts: Experts, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        topk = chosen.shape[1]
        flat = chosen.flatten()
        by_expert = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=experts.router.shape[0]).tolist()
        token = by_expert // topk
        rows = x[token]
        result = torch.empty_like(rows)
        first = 0
        for expert, count in enumerate(counts):
            if count:
                mine = slice(first, first + count)
                wide = self.silu_mul(F.linear(rows[mine], experts.gate_up[expert]))
                result[mine] = F.linear(wide, experts.down[expert])
                first += count
        # Back to [T, topk]: a token's experts are added in the order of its choice, so that the
        # sum does not depend on who else is in the batch.
        back = torch.empty_like(result)
        back[by_expert] = result
        weighted = back.view(x.shape[0], topk, -1).float() * weights[..., None]
        return weighted.sum(dim=1).to(x.dtype)


def route(
    x: torch.Tensor, experts: Experts, topk: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32, experts), [T, topk] each: softmax over all experts, then the largest."""
    logits = F.linear(x, experts.router).float()
    if experts.bias is not None:
        logits = logits + experts.bias.float()
    weights, chosen = logits.softmax(dim=-1).topk(topk, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def _gather(cache: torch.Tensor, blocks: torch.Tensor, requests: int) -> torch.Tensor:
    """Cached tokens of `requests` equally long block tables: [requests, kv_heads, tokens, dim]."""
    kv_heads, dim = cache.shape[2:]
    return cache.index_select(0, blocks).view(requests, -1, kv_heads, dim).transpose(1, 2)


def _similar(decodes: Sequence[Entry]) -> list[Sequence[Entry]]:
    """Cut decodes (sorted by query length and context) into runs that pad little."""
    runs: list[Sequence[Entry]] = []
    first, total = 0, 0
    for i, entry in enumerate(decodes):
        count = i - first
        padding = entry.end * count - total
        other = count and len(entry.tokens) != len(decodes[first].tokens)
        if other or padding > PADDING_TOKENS + total // 8:
            runs.append(decodes[first:i])
            first, total = i, 0
        total += entry.end
    if first < len(decodes):
        runs.append(decodes[first:])
    return runs


def _decode_group(
    run: Sequence[Entry], first: int, heads: HeadShape, block_size: int, device: torch.device
) -> DecodeGroup:
    width = -(-run[-1].end // block_size)
    query = len(run[0].tokens)
    table = [[*e.blocks[:width], *[0] * (width - len(e.blocks))] for e in run]
    ends = torch.tensor([e.end for e in run], dtype=torch.int64, device=device)
    at_key = torch.arange(width * block_size, device=device)
    # Position of each query row: rows are query tokens times the heads of a group.
    at_query = ends[:, None] - query + torch.arange(query, device=device)
    at_query = at_query.repeat_interleave(heads.group, dim=1)[:, None, :, None]
    seen = at_key <= at_query
    if heads.window is not None:
        seen &= at_key > at_query - heads.window
    blocks = torch.tensor(table, dtype=torch.int64).flatten().to(device)
    return DecodeGroup(first, len(run), query, blocks, seen)


def _chunk_mask(entry: Entry, window: int | None, device: torch.device) -> torch.Tensor | None:
    if entry.start == 0 and window is None:
        return None
    at_key = torch.arange(entry.end, device=device)
    at_query = torch.arange(entry.start, entry.end, device=device)[:, None]
    seen = at_key <= at_query
    if window is not None:
        seen &= at_key > at_query - window
    return seen[None, None]
