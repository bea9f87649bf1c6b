"""Plain attention in float64, request by request: what both attention kernels are compared with."""

from __future__ import annotations

import torch


def gather_kv(
    cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The first `seq_len` tokens of one request as [seq_len, kv_heads, dim] float64.

    `cache` is [blocks, block_size, kv_heads, dim], `block_table` one request's row, `scale`
    [kv_heads] for e4m3.
    """
    positions = torch.arange(seq_len, device=cache.device)
    block_size = cache.shape[1]
    blocks = block_table[positions // block_size].long()
    cached = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    tokens = cached[blocks, positions % block_size]
    if cache.dtype == torch.float8_e4m3fn:
        tokens = tokens.view(torch.float8_e4m3fn).to(torch.float32)
    tokens = tokens.to(torch.float64)
    return tokens if scale is None else tokens * scale.to(torch.float64)[:, None]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last queries of one sequence, [q, heads, dim] float64.

    `query` [q, heads, dim] are the last q of the k tokens in `key` and `value` [k, kv_heads, dim];
    query head h reads KV head h // (heads / kv_heads). With a window, a token sees itself and the
    window - 1 tokens before it.
    """
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = key.shape
    key = key.to(torch.float64).repeat_interleave(num_heads // num_kv_heads, dim=1)
    value = value.to(torch.float64).repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.to(torch.float64), key) * scale
    at_query = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
    at_key = torch.arange(num_keys, device=query.device)[None, :]
    visible = at_key <= at_query
    if window is not None:
        visible &= at_key > at_query - window
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), value
    )


def paged_attention_reference(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `paged_decode` and `flash_prefill` compute, in float64; arguments as there."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    starts = query_start.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            key = gather_kv(k_cache, block_table[i], seq_len, k_scale)
            value = gather_kv(v_cache, block_table[i], seq_len, v_scale)
            tokens = slice(starts[i], starts[i + 1])
            out[tokens] = attend(query[tokens], key, value, scale, window)
    return out
