"""Rotary position embedding (Su et al. 2021) of queries and keys, with keys and values written into
the paged cache.

One program takes one token and one KV head: its key, its value, and the query heads that share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import fp8, runtime
from kernels.fp8 import encode_e4m3


@triton.jit
def _rope_cache_kernel(
    Q, K, V, CosSin, Positions, KCache, VCache, Slots, KScale, VScale,
    block_size,
    s_qt, s_qh, s_kt, s_kh, s_vt, s_vh, s_cos, s_kb, s_kp, s_kch, s_vb, s_vp, s_vch,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr, FP8_NATIVE: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    i_kvh = tl.program_id(1)
    o_h = tl.arange(0, HALF_PAD)
    m_h = o_h < HALF
    if INTERLEAVED:  # GPT-J: neighbours turn together; otherwise (GPT-NeoX, Llama) the two halves
        o_1 = o_h * 2
        o_2 = o_h * 2 + 1
    else:
        o_1 = o_h
        o_2 = o_h + HALF
    position = tl.load(Positions + i_t).to(tl.int64)
    b_cos = tl.load(CosSin + position * s_cos + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_sin = tl.load(CosSin + position * s_cos + HALF + o_h, mask=m_h, other=0.0).to(tl.float32)

    # [GROUP_PAD, HALF_PAD]
    o_g = tl.arange(0, GROUP_PAD)
    m_q = (o_g < GROUP)[:, None] & m_h[None, :]
    p_q = Q + i_t * s_qt + (i_kvh * GROUP + o_g)[:, None] * s_qh
    b_q1 = tl.load(p_q + o_1[None, :], mask=m_q, other=0.0).to(tl.float32)
    b_q2 = tl.load(p_q + o_2[None, :], mask=m_q, other=0.0).to(tl.float32)
    tl.store(p_q + o_1[None, :], (b_q1 * b_cos - b_q2 * b_sin).to(Q.dtype.element_ty), mask=m_q)
    tl.store(p_q + o_2[None, :], (b_q2 * b_cos + b_q1 * b_sin).to(Q.dtype.element_ty), mask=m_q)

    p_k = K + i_t * s_kt + i_kvh * s_kh
    b_k1 = tl.load(p_k + o_1, mask=m_h, other=0.0).to(tl.float32)
    b_k2 = tl.load(p_k + o_2, mask=m_h, other=0.0).to(tl.float32)
    b_r1 = (b_k1 * b_cos - b_k2 * b_sin).to(K.dtype.element_ty)
    b_r2 = (b_k2 * b_cos + b_k1 * b_sin).to(K.dtype.element_ty)
    tl.store(p_k + o_1, b_r1, mask=m_h)
    tl.store(p_k + o_2, b_r2, mask=m_h)

    slot = tl.load(Slots + i_t).to(tl.int64)
    if slot < 0:  # a padding token
        return
    p_kc = KCache + slot // block_size * s_kb + slot % block_size * s_kp + i_kvh * s_kch
    p_vc = VCache + slot // block_size * s_vb + slot % block_size * s_vp + i_kvh * s_vch
    o_d = tl.arange(0, DIM_PAD)
    m_d = o_d < HEAD_DIM
    m_rest = m_d & (o_d >= 2 * HALF)  # dimensions that do not turn
    b_v = tl.load(V + i_t * s_vt + i_kvh * s_vh + o_d, mask=m_d, other=0.0)
    b_rest = tl.load(p_k + o_d, mask=m_rest, other=0.0)
    if FP8:
        k_inverse = tl.div_rn(1.0, tl.load(KScale + i_kvh))
        v_inverse = tl.div_rn(1.0, tl.load(VScale + i_kvh))
        tl.store(p_kc + o_1, encode_e4m3(b_r1.to(tl.float32) * k_inverse, FP8_NATIVE), mask=m_h)
        tl.store(p_kc + o_2, encode_e4m3(b_r2.to(tl.float32) * k_inverse, FP8_NATIVE), mask=m_h)
        tl.store(p_vc + o_d, encode_e4m3(b_v.to(tl.float32) * v_inverse, FP8_NATIVE), mask=m_d)
        if 2 * HALF < HEAD_DIM:
            tl.store(
                p_kc + o_d, encode_e4m3(b_rest.to(tl.float32) * k_inverse, FP8_NATIVE), mask=m_rest
            )
    else:
        tl.store(p_kc + o_1, b_r1, mask=m_h)
        tl.store(p_kc + o_2, b_r2, mask=m_h)
        tl.store(p_vc + o_d, b_v, mask=m_d)
        if 2 * HALF < HEAD_DIM:
            tl.store(p_kc + o_d, b_rest, mask=m_rest)


def rope_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Turn `query` and `key` in place by their positions, and write key and value into the cache.

    query        [tokens, heads, dim]; key, value [tokens, kv_heads, dim], same dtype; any strides,
                 last axis contiguous.
    cos_sin      [max_position, rotary_dim]: cosines, then sines (`cos_sin_table`); rotary_dim <=
                 dim, the dimensions past it do not turn. positions [tokens] int32 or int64.
    k_cache, v_cache  [blocks, block_size, kv_heads, dim] in the key's dtype or e4m3; e4m3 takes
                      k_scale, v_scale
                 [kv_heads] fp32 and stores x / scale, rounded to nearest even and saturated at 448.
    slots        [tokens] int64: block * block_size + offset; a negative slot marks a padding token,
                 nothing is written.
    interleaved  pairs are neighbours (GPT-J) rather than halves (GPT-NeoX, Llama).
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    rotary_dim = cos_sin.shape[1]
    is_fp8 = k_cache.dtype == runtime.FP8
    runtime.one_of("query dtype", query.dtype, runtime.FLOAT_TYPES)
    runtime.one_of("key dtype", key.dtype, (query.dtype,))
    runtime.one_of("cache dtype", k_cache.dtype, (query.dtype, runtime.FP8))
    runtime.one_of("v_cache dtype", v_cache.dtype, (k_cache.dtype,))
    runtime.expect_shape("key", key, num_tokens, None, head_dim)
    runtime.expect_shape("value", value, *key.shape)
    runtime.expect_shape("k_cache", k_cache, None, None, num_kv_heads, head_dim)
    runtime.expect_shape("v_cache", v_cache, *k_cache.shape)
    runtime.expect_shape("positions", positions, num_tokens)
    runtime.expect_shape("slots", slots, num_tokens)
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ValueError(
            f"rotary_dim {rotary_dim} is not supported; supported: even, 2 to head_dim {head_dim}"
        )
    for name, tensor in (
        ("query", query),
        ("key", key),
        ("value", value),
        ("k_cache", k_cache),
        ("v_cache", v_cache),
    ):
        runtime.unit_stride(name, tensor)
    if is_fp8:
        if k_scale is None or v_scale is None:
            raise ValueError("an e4m3 cache needs k_scale and v_scale, [kv_heads] fp32")
        runtime.expect_shape("k_scale", k_scale, num_kv_heads)
        runtime.expect_shape("v_scale", v_scale, num_kv_heads)
    group = num_heads // num_kv_heads
    runtime.launch(
        _rope_cache_kernel, (num_tokens, num_kv_heads),
        query, key, value, cos_sin, positions, fp8.as_bytes(k_cache), fp8.as_bytes(v_cache), slots,
        k_scale, v_scale,
        k_cache.shape[1],
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], cos_sin.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        GROUP=group, GROUP_PAD=runtime.next_power_of_2(group),
        HEAD_DIM=head_dim, DIM_PAD=runtime.next_power_of_2(head_dim),
        HALF=rotary_dim // 2, HALF_PAD=runtime.next_power_of_2(rotary_dim // 2),
        INTERLEAVED=interleaved,
        FP8=is_fp8, FP8_NATIVE=fp8.native(runtime.chip(query.device).arch, query.device),
        num_warps=1 if group * head_dim <= 1024 else 4,
    )  # fmt: skip


def cos_sin_table(
    max_position: int, rotary_dim: int, theta: float = 10000.0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[max_position, rotary_dim] fp32: cosines of position * theta^(-2i / rotary_dim); sines."""
    frequency = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(max_position, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1).to(device=device, dtype=torch.float32)


def rope_reference(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """`x` [tokens, heads, dim] turned by its positions, in float64."""
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin.to(torch.float64)[positions.long()][:, None].chunk(2, -1)
    out = x.to(torch.float64).clone()
    turning = out[..., :rotary_dim]
    if interleaved:
        first, second = turning[..., 0::2].clone(), turning[..., 1::2].clone()
        turning[..., 0::2], turning[..., 1::2] = (
            first * cos - second * sin,
            second * cos + first * sin,
        )
    else:
        first, second = turning.clone().chunk(2, -1)
        turning[..., : rotary_dim // 2] = first * cos - second * sin
        turning[..., rotary_dim // 2 :] = second * cos + first * sin
    return out
