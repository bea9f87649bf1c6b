"""Decode attention over a paged KV cache: few query tokens, a long context, split over programs.

Method: FlashDecoding (Dao et al. 2023) over vLLM's block tables (Kwon et al. 2023, PagedAttention).
One program takes all query heads that share a KV head (GQA, Ainslie et al. 2023), so every cached
byte is read once, and one stretch of `split_len` tokens of one request; a second kernel joins the
stretches by their log-sum-exp. Stretches have a fixed length rather than a fixed number, so that a
long request in a batch of short ones is cut into more pieces.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import fp8, runtime
from kernels.fp8 import decode_e4m3

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_BLOCK_SIZE = 64
MAX_QUERY_ROWS = 128


class DecodeConfig(NamedTuple):
    """Tile of the decode kernel: context tokens per iteration, warps, and iterations in flight."""

    block_n: int
    num_warps: int
    num_stages: int


def decode_config(arch: int, head_dim: int, kv_bytes: int, rows: int) -> DecodeConfig:
    """Tile for a chip, a head dimension, bytes of a cached number, query rows of a program.

    The loop waits on memory: about 35 KB must be on the way per multiprocessor to fill an H200's
    bandwidth, so a tile of keys and values is held near 32 KB and two to three of them in flight,
    within the chip's shared memory.
    """
    padded = runtime.next_power_of_2(head_dim)
    if kv_bytes == 4:  # exact fp32 runs on plain multiply-adds, operands in registers
        return DecodeConfig(16, num_warps=4, num_stages=2)
    block_n = max(16, min(128, 16384 // (padded * kv_bytes)))
    if rows > 32:
        block_n = min(block_n, 64 if arch >= 90 else 32)
    return DecodeConfig(block_n, num_warps=8 if rows > 64 else 4, num_stages=3)


def split_length(chip: runtime.Chip, num_pairs: int, max_seq_len: int, block_n: int) -> int:
    """Tokens per program, at least 256, for about four programs per multiprocessor."""
    splits = runtime.cdiv(4 * chip.num_sms, max(1, num_pairs))
    length = max(256, runtime.cdiv(max(1, max_seq_len), splits))
    return runtime.cdiv(length, block_n) * block_n


# The number of splits follows the longest context: special values of it must not compile anew.
@triton.jit(do_not_specialize=["num_splits_max"])
def _decode_kernel(
    Q, K, V, Out, PartOut, PartLse, BlockTable, SeqLens, QueryStart, KScale, VScale,
    scale_log2, split_len, window, num_splits_max,
    s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ot, s_oh, s_table,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    VARLEN: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr, FP8_NATIVE: tl.constexpr, DOT_FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_split, i_kvh, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if VARLEN:
        q_start = tl.load(QueryStart + i_b)
        q_len = tl.load(QueryStart + i_b + 1) - q_start
    else:
        q_start = i_b
        q_len = 1
    seq_len = tl.load(SeqLens + i_b)
    first = seq_len - q_len  # position of the first query token
    begin = 0
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0)
    num_splits = tl.cdiv(seq_len - begin, split_len)
    lo = begin + i_split * split_len
    hi = tl.minimum(lo + split_len, seq_len)

    # A row is one query head of one query token: row = token * GROUP + head within the group.
    o_row = tl.arange(0, ROWS)
    o_d = tl.arange(0, DIM_PAD)
    o_tok = o_row // GROUP
    m_row = o_tok < q_len
    o_head = i_kvh * GROUP + o_row % GROUP
    m_d = o_d < HEAD_DIM
    m_q = m_row[:, None] & m_d[None, :]
    o_pos = first + o_tok
    p_out = (
        Out + (q_start + o_tok).to(tl.int64)[:, None] * s_ot + o_head[:, None] * s_oh + o_d[None, :]
    )
    if seq_len == 0:  # an empty slot of a padded batch
        if i_split == 0:
            tl.store(
                p_out, tl.zeros([ROWS, DIM_PAD], tl.float32).to(Out.dtype.element_ty), mask=m_q
            )
        return
    if lo >= seq_len:
        return

    # [ROWS, DIM_PAD]
    p_q = Q + (q_start + o_tok).to(tl.int64)[:, None] * s_qt + o_head[:, None] * s_qh + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)
    k_scale = scale_log2
    if FP8:
        b_q = b_q.to(tl.float16)
        k_scale = scale_log2 * tl.load(KScale + i_kvh)
    if DOT_FP32:
        b_q = b_q.to(tl.float32)

    b_m = tl.full([ROWS], float("-inf"), tl.float32)
    b_l = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, DIM_PAD], tl.float32)

    o_n = tl.arange(0, BLOCK_N)
    p_table = BlockTable + i_b.to(tl.int64) * s_table
    p_k = K + i_kvh * s_kh
    p_v = V + i_kvh * s_vh
    # The table is read one tile ahead, so that the loads of keys and values never wait for it.
    b_block = tl.load(p_table + (lo + o_n) // BLOCK_SIZE, mask=lo + o_n < hi, other=0)
    for start in range(lo, hi, BLOCK_N):
        o_key = start + o_n
        m_key = o_key < hi
        b_id = b_block.to(tl.int64)
        o_in = o_key % BLOCK_SIZE
        b_block = tl.load(
            p_table + (o_key + BLOCK_N) // BLOCK_SIZE, mask=o_key + BLOCK_N < hi, other=0
        )
        # [DIM_PAD, BLOCK_N]
        b_k = tl.load(
            p_k + (b_id * s_kb + o_in * s_kt)[None, :] + o_d[:, None],
            mask=m_key[None, :] & m_d[:, None], other=0,
        )  # fmt: skip
        # [BLOCK_N, DIM_PAD]
        b_v = tl.load(
            p_v + (b_id * s_vb + o_in * s_vt)[:, None] + o_d[None, :],
            mask=m_key[:, None] & m_d[None, :], other=0,
        )  # fmt: skip
        if FP8:
            b_k = decode_e4m3(b_k, FP8_NATIVE)
            b_v = decode_e4m3(b_v, FP8_NATIVE)
        if DOT_FP32:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)
        # [ROWS, BLOCK_N], in units of log2
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * k_scale
        m_s = m_key[None, :]
        if VARLEN:
            m_s = m_s & (o_key[None, :] <= o_pos[:, None])
        if WINDOW:
            m_s = m_s & (o_key[None, :] > o_pos[:, None] - window)
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        # A row may see nothing yet (padding, or a window that begins later): keep -inf - -inf out.
        b_ref = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        b_p = tl.exp2(b_s - b_ref[:, None])
        b_alpha = tl.exp2(b_m - b_ref)
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_acc = b_acc * b_alpha[:, None]
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        b_m = b_m_new

    # A row without a visible key (l = 0) has acc = 0 and m = -inf: it weighs exp2(-inf) = 0 later.
    b_l = tl.where(b_l == 0.0, 1.0, b_l)
    b_out = b_acc / b_l[:, None]
    if FP8:
        b_out = b_out * tl.load(VScale + i_kvh)
    if num_splits == 1:
        tl.store(p_out, b_out.to(Out.dtype.element_ty), mask=m_q)
    else:
        o_part = ((i_b * NUM_KV_HEADS + i_kvh) * num_splits_max + i_split).to(
            tl.int64
        ) * ROWS + o_row
        tl.store(PartOut + o_part[:, None] * HEAD_DIM + o_d[None, :], b_out, mask=m_q)
        tl.store(PartLse + o_part, b_m + tl.log2(b_l), mask=m_row)


@triton.jit(do_not_specialize=["num_splits_max"])
def _reduce_kernel(
    PartOut, PartLse, Out, SeqLens, QueryStart,
    split_len, window, num_splits_max, s_ot, s_oh,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr, VARLEN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    i_row, i_kvh, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if VARLEN:
        q_start = tl.load(QueryStart + i_b)
        q_len = tl.load(QueryStart + i_b + 1) - q_start
    else:
        q_start = i_b
        q_len = 1
    i_tok = i_row // GROUP
    seq_len = tl.load(SeqLens + i_b)
    begin = 0
    if WINDOW:
        begin = tl.maximum(seq_len - q_len - window + 1, 0)
    num_splits = tl.cdiv(seq_len - begin, split_len)
    if (num_splits <= 1) | (i_tok >= q_len):
        return
    o_d = tl.arange(0, DIM_PAD)
    m_d = o_d < HEAD_DIM
    o_split = tl.arange(0, SPLITS_PAD)
    m_split = o_split < num_splits
    o_part = ((i_b * NUM_KV_HEADS + i_kvh) * num_splits_max + o_split).to(tl.int64) * ROWS + i_row
    b_lse = tl.load(PartLse + o_part, mask=m_split, other=float("-inf"))
    b_w = tl.exp2(b_lse - tl.max(b_lse, 0))
    b_w = b_w / tl.sum(b_w, 0)
    # [SPLITS_PAD, DIM_PAD]
    b_part = tl.load(
        PartOut + o_part[:, None] * HEAD_DIM + o_d[None, :],
        mask=m_split[:, None] & m_d[None, :], other=0.0,
    )  # fmt: skip
    b_out = tl.sum(b_part * b_w[:, None], 0)
    i_head = i_kvh * GROUP + i_row % GROUP
    p_out = Out + (q_start + i_tok).to(tl.int64) * s_ot + i_head * s_oh + o_d
    tl.store(p_out, b_out.to(Out.dtype.element_ty), mask=m_d)


def paged_decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    query_start: torch.Tensor | None = None,
    max_query_len: int = 1,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    split_len: int | None = None,
) -> torch.Tensor:
    """Attention of the newest token(s) of each request over its cached context, causal. Returns
    [tokens, heads, dim].

    query        [tokens, heads, dim] fp16, bf16 or fp32; one token per request, in the order of
                 `seq_lens`, unless
    query_start  [requests + 1] int32 says where each request's tokens begin (speculation: 1 +
                 drafts per request); then `max_query_len` bounds them, with max_query_len * heads /
                 kv_heads <= 128.
    k_cache, v_cache  [blocks, block_size, kv_heads, dim], the query's dtype or e4m3; any strides
                      with the last axis
                 contiguous, so a permuted head-major cache works too. block_size 1 to 64.
    block_table  [requests, >= max_blocks] int32: physical block of each logical block; entries past
                 the context are not used as addresses.
    seq_lens     [requests] int32: context length including the query tokens, which are cached
                 already. A length of 0 marks an empty slot (its output is zero).
    max_seq_len  host integer, at least max(seq_lens): fixes the grid without waiting for the
                 device.
    scale        softmax scale, 1 / sqrt(dim) by default.
    window       sliding window: a token sees itself and the window - 1 tokens before it.
    k_scale, v_scale  [kv_heads] fp32 on the device, what an e4m3 number is multiplied by; needed
                      for e4m3.

    Raises ValueError, one line, for shapes and types outside this.
    """
    num_tokens, num_heads, head_dim = query.shape
    _num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    num_requests = seq_lens.shape[0]
    is_fp8 = k_cache.dtype == runtime.FP8
    _check(query, k_cache, v_cache, block_table, seq_lens, max_seq_len, window, k_scale, v_scale)
    if query_start is None and (num_tokens != num_requests or max_query_len != 1):
        raise ValueError(
            f"{num_tokens} query tokens for {num_requests} requests, "
            f"up to {max_query_len} each: pass query_start"
        )
    group = num_heads // num_kv_heads
    if max_query_len * group > MAX_QUERY_ROWS:
        raise ValueError(
            f"max_query_len {max_query_len} x {group} heads per KV head exceeds "
            f"{MAX_QUERY_ROWS} rows: use flash_prefill"
        )
    if out is None:
        out = torch.empty_like(query)
    runtime.unit_stride("out", out)

    chip = runtime.chip(query.device)
    rows = max(16, runtime.next_power_of_2(max_query_len * group))
    config = config or decode_config(chip.arch, head_dim, k_cache.element_size(), rows)
    longest = max_seq_len if window is None else min(max_seq_len, window + max_query_len - 1)
    if split_len is None:
        split_len = split_length(chip, num_requests * num_kv_heads, longest, config.block_n)
    num_splits = max(1, runtime.cdiv(longest, split_len))
    part_out = query.new_empty(
        (num_requests, num_kv_heads, num_splits, rows, head_dim) if num_splits > 1 else (1,),
        dtype=torch.float32,
    )
    part_lse = query.new_empty(part_out.shape[:-1] if num_splits > 1 else (1,), dtype=torch.float32)

    shape = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "ROWS": rows, "HEAD_DIM": head_dim,
        "DIM_PAD": runtime.next_power_of_2(head_dim),
        "VARLEN": query_start is not None, "WINDOW": window is not None,
    }  # fmt: skip
    runtime.launch(
        _decode_kernel, (num_splits, num_kv_heads, num_requests),
        query, fp8.as_bytes(k_cache), fp8.as_bytes(v_cache), out, part_out, part_lse, block_table,
        seq_lens,
        query_start, k_scale, v_scale,
        (head_dim**-0.5 if scale is None else scale) / math.log(2), split_len, window or 0,
        num_splits,
        *query.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2],
        block_table.stride(0),
        **shape, BLOCK_SIZE=block_size, BLOCK_N=config.block_n,
        FP8=is_fp8, FP8_NATIVE=fp8.native(chip.arch, query.device),
        DOT_FP32=runtime.dot_in_fp32(query) and not is_fp8,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        runtime.launch(
            _reduce_kernel, (max_query_len * group, num_kv_heads, num_requests),
            part_out, part_lse, out, seq_lens, query_start, split_len, window or 0,
            num_splits, *out.stride()[:2],
            **shape, SPLITS_PAD=runtime.next_power_of_2(num_splits), num_warps=4,
        )  # fmt: skip
    return out


def _check(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    head_dim, num_heads = query.shape[2], query.shape[1]
    block_size, num_kv_heads = k_cache.shape[1:3]
    runtime.one_of("head_dim", head_dim, HEAD_DIMS)
    runtime.one_of("query dtype", query.dtype, runtime.FLOAT_TYPES)
    runtime.one_of("cache dtype", k_cache.dtype, (query.dtype, runtime.FP8))
    runtime.one_of("v_cache dtype", v_cache.dtype, (k_cache.dtype,))
    runtime.expect_shape("k_cache", k_cache, None, None, None, head_dim)
    runtime.expect_shape("v_cache", v_cache, *k_cache.shape)
    for name, tensor in (("query", query), ("k_cache", k_cache), ("v_cache", v_cache)):
        runtime.unit_stride(name, tensor)
    runtime.unit_stride("block_table", block_table)
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(
            f"block_size {block_size} is not supported; supported: 1 to {MAX_BLOCK_SIZE}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if block_table.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            f"block_table has {block_table.shape[0]} rows for {seq_lens.shape[0]} requests"
        )
    if block_table.shape[1] * block_size < max_seq_len:
        raise ValueError(
            f"block_table holds {block_table.shape[1]} blocks of {block_size}: "
            f"too few for max_seq_len {max_seq_len}"
        )
    if k_cache.dtype == runtime.FP8:
        if k_scale is None or v_scale is None:
            raise ValueError("an e4m3 cache needs k_scale and v_scale, [kv_heads] fp32")
        runtime.expect_shape("k_scale", k_scale, num_kv_heads)
        runtime.expect_shape("v_scale", v_scale, num_kv_heads)
