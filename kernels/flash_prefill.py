"""Causal attention of prompt chunks of several requests at once, over the paged cache or over
contiguous tensors.

Method: FlashAttention-2 (Dao 2023): a tile of queries stays, tiles of keys and values stream past,
softmax is kept running and rescaled, scores never reach memory. Chunked prefill (Sarathi-Serve,
Agrawal et al. 2024): the queries of a request are its last tokens and see everything cached before
them.

The heads that share a KV head are packed into the rows of a query tile: row = token * group + head.
A tile then spans fewer tokens, so less of its diagonal is masked away, and a cached byte is read
once per group.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import fp8, runtime
from kernels.fp8 import decode_e4m3
from kernels.paged_attention import HEAD_DIMS, MAX_BLOCK_SIZE


class PrefillConfig(NamedTuple):
    """Tile of the prefill kernel: query rows, keys per iteration, warps, iterations in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(
    arch: int, head_dim: int, element_size: int, rows: int, window: bool
) -> PrefillConfig:
    """Tile for a chip, head dimension, bytes per number, rows (tokens x group) of a chunk.

    Chosen so that nothing spills and a tile is always on the way while another is worked on. Hopper
    keeps 128 rows as two warp groups of wgmma and three tiles of 128 keys in its 227 KB; a window
    adds a third loop, hence fewer keys. Ampere and Ada hold the operands of a product in registers,
    which limits them before their 163 and 99 KB do. Exact fp32 runs on plain multiply-adds.
    """
    padded = runtime.next_power_of_2(head_dim)
    if element_size == 4:
        return PrefillConfig(16, 16, num_warps=4, num_stages=2)
    if padded == 256:
        if arch >= 90 and rows > 64:
            return PrefillConfig(128, 32, num_warps=8, num_stages=3)
        return PrefillConfig(64, 16 if arch == 89 else 32, num_warps=8, num_stages=3)
    block_m, num_warps = (64, 4) if rows <= 64 else (128, 8)
    if arch >= 90:
        block_n = 64 if window or rows <= 64 else 128
    else:
        block_n = 64 if padded == 64 and rows > 64 else 32
    return PrefillConfig(block_m, block_n, num_warps, num_stages=3)


@triton.jit
def _stream_tiles(
    b_acc, b_l, b_m, b_q, p_k, p_v, p_table, lo, hi, k_end, o_pos, scale_log2, window,
    s_kb, s_kt, s_vb, s_vt,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, FP8_NATIVE: tl.constexpr, DOT_FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take keys lo..hi into the running softmax; without MASKED whole tiles that all rows see."""
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, DIM_PAD)
    if PAGED:
        # Read one tile ahead, so that the loads of keys and values never wait for the table.
        b_block = tl.load(p_table + (lo + o_n) // BLOCK_SIZE, mask=lo + o_n < k_end, other=0)
    for start in range(lo, hi, BLOCK_N):
        o_key = start + o_n
        if PAGED:
            b_id = b_block.to(tl.int64)
            o_in = o_key % BLOCK_SIZE
            b_block = tl.load(
                p_table + (o_key + BLOCK_N) // BLOCK_SIZE, mask=o_key + BLOCK_N < k_end, other=0
            )
            o_k = b_id * s_kb + o_in * s_kt
            o_v = b_id * s_vb + o_in * s_vt
        else:
            o_k = o_key.to(tl.int64) * s_kt
            o_v = o_key.to(tl.int64) * s_vt
        # b_k [DIM_PAD, BLOCK_N], b_v [BLOCK_N, DIM_PAD]
        pp_k = p_k + o_k[None, :] + o_d[:, None]
        pp_v = p_v + o_v[:, None] + o_d[None, :]
        if MASKED:
            m_key = o_key < k_end
            b_k = tl.load(pp_k, mask=m_key[None, :] & (o_d < HEAD_DIM)[:, None], other=0)
            b_v = tl.load(pp_v, mask=m_key[:, None] & (o_d < HEAD_DIM)[None, :], other=0)
        elif HEAD_DIM == DIM_PAD:
            b_k = tl.load(pp_k)
            b_v = tl.load(pp_v)
        else:
            b_k = tl.load(pp_k, mask=(o_d < HEAD_DIM)[:, None], other=0)
            b_v = tl.load(pp_v, mask=(o_d < HEAD_DIM)[None, :], other=0)
        if FP8:
            b_k = decode_e4m3(b_k, FP8_NATIVE)
            b_v = decode_e4m3(b_v, FP8_NATIVE)
        if DOT_FP32:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION)
        if MASKED:
            m_s = (o_key[None, :] <= o_pos[:, None]) & (o_key < k_end)[None, :]
            if WINDOW:
                m_s = m_s & (o_key[None, :] > o_pos[:, None] - window)
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * scale_log2)
        if WINDOW:
            # A row whose window begins in a later tile has seen nothing yet: keep -inf - -inf out.
            b_ref = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        else:
            b_ref = b_m_new
        b_p = tl.exp2(b_s * scale_log2 - b_ref[:, None])
        b_alpha = tl.exp2(b_m - b_ref)
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_acc = b_acc * b_alpha[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_m = b_m_new
    return b_acc, b_l, b_m


@triton.jit(do_not_specialize=["num_requests"])
def _prefill_kernel(
    Q, K, V, Out, BlockTable, SeqLens, QueryStart, KScale, VScale,
    scale_log2, window, num_requests,
    s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ot, s_oh, s_table,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, FP8_NATIVE: tl.constexpr, DOT_FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP  # tokens of a tile; rows past BLOCK_Q * GROUP are idle
    i_kvh = tl.program_id(0)
    # The last tiles of a request have the most keys: they start first.
    i_tile = tl.num_programs(1) - 1 - tl.program_id(1)

    # Request i owns tile numbers from query_start[i] // BLOCK_Q + i on: room for all its tiles.
    left = 0
    right = num_requests
    while right - left > 1:
        middle = (left + right) // 2
        if tl.load(QueryStart + middle) // BLOCK_Q + middle <= i_tile:
            left = middle
        else:
            right = middle
    i_b = left
    q_start = tl.load(QueryStart + i_b)
    q_len = tl.load(QueryStart + i_b + 1) - q_start
    first = (
        i_tile - (q_start // BLOCK_Q + i_b)
    ) * BLOCK_Q  # of the tile's tokens, within the chunk
    if first >= q_len:
        return
    last = tl.minimum(first + BLOCK_Q, q_len) - 1
    if PAGED:
        prefix = tl.load(SeqLens + i_b) - q_len
    else:
        prefix = 0

    o_row = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, DIM_PAD)
    o_tok = first + o_row // GROUP
    o_pos = prefix + o_tok
    m_q = ((o_tok < q_len) & (o_row < BLOCK_Q * GROUP))[:, None] & (o_d < HEAD_DIM)[None, :]
    o_head = i_kvh * GROUP + o_row % GROUP
    o_t = (q_start + o_tok).to(tl.int64)
    # [BLOCK_M, DIM_PAD]
    b_q = tl.load(
        Q + o_t[:, None] * s_qt + o_head[:, None] * s_qh + o_d[None, :], mask=m_q, other=0.0
    )
    if FP8:
        b_q = b_q.to(tl.float16)
        scale_log2 = scale_log2 * tl.load(KScale + i_kvh)
    if DOT_FP32:
        b_q = b_q.to(tl.float32)

    p_k = K + i_kvh.to(tl.int64) * s_kh
    p_v = V + i_kvh.to(tl.int64) * s_vh
    p_table = BlockTable
    if PAGED:
        p_table = BlockTable + i_b.to(tl.int64) * s_table
    else:
        p_k += q_start.to(tl.int64) * s_kt
        p_v += q_start.to(tl.int64) * s_vt

    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)

    # Keys before `full_hi` are visible to every row of the tile (from `full_lo` on, with a window);
    # tiles of keys outside what any row sees are skipped.
    k_end = prefix + last + 1
    full_hi = (prefix + first + 1) // BLOCK_N * BLOCK_N
    full_lo = 0
    if WINDOW:
        lo = tl.maximum(prefix + first - window + 1, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.cdiv(tl.maximum(prefix + last - window + 1, 0), BLOCK_N) * BLOCK_N
        full_lo = tl.minimum(full_lo, tl.cdiv(k_end, BLOCK_N) * BLOCK_N)
        full_hi = tl.maximum(full_hi, full_lo)
        b_acc, b_l, b_m = _stream_tiles(
            b_acc, b_l, b_m, b_q, p_k, p_v, p_table, lo, full_lo, k_end, o_pos, scale_log2, window,
            s_kb, s_kt, s_vb, s_vt, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N,
            True, PAGED, WINDOW, FP8, FP8_NATIVE, DOT_FP32, PRECISION,
        )  # fmt: skip
    b_acc, b_l, b_m = _stream_tiles(
        b_acc, b_l, b_m, b_q, p_k, p_v, p_table, full_lo, full_hi, k_end, o_pos, scale_log2, window,
        s_kb, s_kt, s_vb, s_vt, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N,
        False, PAGED, WINDOW, FP8, FP8_NATIVE, DOT_FP32, PRECISION,
    )  # fmt: skip
    b_acc, b_l, b_m = _stream_tiles(
        b_acc, b_l, b_m, b_q, p_k, p_v, p_table, full_hi, k_end, k_end, o_pos, scale_log2, window,
        s_kb, s_kt, s_vb, s_vt, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_N,
        True, PAGED, WINDOW, FP8, FP8_NATIVE, DOT_FP32, PRECISION,
    )  # fmt: skip

    b_out = b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]  # idle rows may have seen nothing
    if FP8:
        b_out = b_out * tl.load(VScale + i_kvh)
    p_out = Out + o_t[:, None] * s_ot + o_head[:, None] * s_oh + o_d[None, :]
    tl.store(p_out, b_out.to(Out.dtype.element_ty), mask=m_q)


def flash_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start: torch.Tensor,
    max_query_len: int,
    *,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Causal attention of each request's chunk over everything up to it. Returns [tokens, heads,
    dim].

    query        [tokens, heads, dim] fp16, bf16 or fp32: the chunks of all requests, one after the
                 other.
    query_start  [requests + 1] int32: where each chunk begins; the last entry is the number of
                 tokens.
    max_query_len  host integer, at least the longest chunk.

    With `block_table` and `seq_lens`: key and value are the caches [blocks, block_size, kv_heads,
    dim], in the query's dtype or e4m3 (then k_scale, v_scale [kv_heads] fp32), and hold the chunks'
    own tokens already. seq_lens [requests] int32 is the length of prefix plus chunk; block_table
    [requests, blocks] int32. Without: key and value are [tokens, kv_heads, dim] beside the queries,
    and no request has a prefix.

    scale (> 0, 1 / sqrt(dim) by default) and window as in `paged_decode`. Raises ValueError, one
    line, for shapes and types outside this.
    """
    paged = block_table is not None
    if paged != (seq_lens is not None):
        raise ValueError("pass both block_table and seq_lens (paged), or neither (contiguous)")
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[-2]
    num_requests = query_start.shape[0] - 1
    is_fp8 = key.dtype == runtime.FP8
    scale = head_dim**-0.5 if scale is None else scale
    _check(query, key, value, block_table, seq_lens, num_requests, scale, window, k_scale, v_scale)
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty_like(query)
    runtime.unit_stride("out", out)
    if num_tokens == 0:
        return out

    chip = runtime.chip(query.device)
    if config is None:
        rows = max_query_len * group
        config = prefill_config(chip.arch, head_dim, query.element_size(), rows, window is not None)
    block_m = max(config.block_m, runtime.next_power_of_2(group))
    num_tiles = num_tokens // (block_m // group) + num_requests
    strides = (
        (*key.stride()[:3], *value.stride()[:3])
        if paged
        else (0, *key.stride()[:2], 0, *value.stride()[:2])
    )
    runtime.launch(
        _prefill_kernel, (num_kv_heads, num_tiles),
        query, fp8.as_bytes(key), fp8.as_bytes(value), out, block_table, seq_lens, query_start,
        k_scale, v_scale,
        scale / math.log(2), window or 0, num_requests,
        *query.stride()[:2], *strides, *out.stride()[:2],
        block_table.stride(0) if block_table is not None else 0,
        GROUP=group, BLOCK_M=block_m, BLOCK_N=config.block_n,
        HEAD_DIM=head_dim, DIM_PAD=runtime.next_power_of_2(head_dim),
        BLOCK_SIZE=key.shape[1] if paged else 1,
        PAGED=paged, WINDOW=window is not None,
        FP8=is_fp8, FP8_NATIVE=fp8.native(chip.arch, query.device),
        DOT_FP32=runtime.dot_in_fp32(query) and not is_fp8,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    num_requests: int,
    scale: float,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[-2]
    runtime.one_of("head_dim", head_dim, HEAD_DIMS)
    runtime.one_of("query dtype", query.dtype, runtime.FLOAT_TYPES)
    runtime.one_of("value dtype", value.dtype, (key.dtype,))
    runtime.expect_shape("value", value, *key.shape)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        runtime.unit_stride(name, tensor)
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if num_heads // num_kv_heads > 128:
        raise ValueError(
            f"{num_heads // num_kv_heads} query heads per KV head are not supported; "
            "supported: 1 to 128"
        )
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if block_table is None or seq_lens is None:
        runtime.one_of("key dtype", key.dtype, (query.dtype,))
        runtime.expect_shape("key", key, num_tokens, None, head_dim)
        return
    runtime.one_of("cache dtype", key.dtype, (query.dtype, runtime.FP8))
    runtime.expect_shape("key", key, None, None, None, head_dim)
    runtime.expect_shape("seq_lens", seq_lens, num_requests)
    runtime.expect_shape("block_table", block_table, num_requests, None)
    runtime.unit_stride("block_table", block_table)
    if not 1 <= key.shape[1] <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"block_size {key.shape[1]} is not supported; supported: 1 to {MAX_BLOCK_SIZE}"
        )
    if key.dtype == runtime.FP8:
        if k_scale is None or v_scale is None:
            raise ValueError("an e4m3 cache needs k_scale and v_scale, [kv_heads] fp32")
        runtime.expect_shape("k_scale", k_scale, num_kv_heads)
        runtime.expect_shape("v_scale", v_scale, num_kv_heads)
