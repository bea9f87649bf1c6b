"""A mixture-of-experts layer: gate and up products with the activation fused, down product with the
weights fused.

Both products are grouped: every tile of rows belongs to one expert (`moe_align`) and multiplies
that expert's matrix. The first gathers its rows by token and stores them sorted; the second reads
them as they lie, weights them, and scatters one row per slot, which a last kernel adds up per
token, with the shared experts and the residual. No atomics: the same input gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import runtime
from kernels.activation import silu
from kernels.moe_align import Alignment, align
from kernels.moe_router import Routing


class MoeConfig(NamedTuple):
    """Tiles of the grouped products; the down product takes twice `block_n` columns."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


def moe_config(arch: int, element_size: int, rows_per_expert: float) -> MoeConfig:
    """Tiles for a chip, bytes per number, and the mean rows per expert.

    Few rows: the products wait for weights, so tiles are low and deep. Many: 128 rows and twice 128
    columns in fp32 accumulators are half of the registers of two warp groups.
    """
    if element_size == 4:
        return MoeConfig(16, 32, 32, 1, num_warps=4, num_stages=2)
    stages = 3 if arch == 89 else 4
    if rows_per_expert <= 16:
        return MoeConfig(16, 64, 128, 1, num_warps=4, num_stages=stages)
    if rows_per_expert <= 32:
        return MoeConfig(32, 64, 64, 1, num_warps=4, num_stages=stages)
    if rows_per_expert <= 96 or arch == 89:
        return MoeConfig(64, 64, 64, 8, num_warps=4, num_stages=stages)
    return MoeConfig(128, 128 if arch >= 90 else 64, 64, 16, num_warps=8, num_stages=stages)


@triton.jit
def _tile_of(pid, num_tiles, num_columns, GROUP_M: tl.constexpr):
    """Row tile and column of a program: columns of GROUP_M row tiles one after the other, so that
    what neighbours read stays in L2."""
    per_group = GROUP_M * num_columns
    first = pid // per_group * GROUP_M
    height = tl.minimum(num_tiles - first, GROUP_M)
    return first + pid % per_group % height, pid % per_group // height


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up_kernel(
    X, W, Hidden, Rows, TileExpert, TileRows,
    num_tiles, width, depth,
    s_x, s_we, s_wn, s_h,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, DOT_FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_m, i_n = _tile_of(tl.program_id(0), num_tiles, tl.cdiv(width, BLOCK_N), GROUP_M)
    num_rows = tl.load(TileRows + i_m)
    if num_rows == 0:
        return
    i_e = tl.load(TileExpert + i_m).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < num_rows
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    b_token = tl.load(Rows + i_m * BLOCK_M + o_m, mask=m_m, other=0) // TOP_K
    p_x = X + b_token.to(tl.int64)[:, None] * s_x + o_k[None, :]
    # Columns past the width wrap around: read for nothing, never stored, and no mask in the loop.
    p_gate = W + i_e * s_we + (o_n % width).to(tl.int64)[None, :] * s_wn + o_k[:, None]
    p_up = p_gate + width.to(tl.int64) * s_wn
    b_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, depth, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x)
            b_wg = tl.load(p_gate)
            b_wu = tl.load(p_up)
        else:
            m_k = k + o_k < depth
            b_x = tl.load(p_x, mask=m_k[None, :], other=0.0)
            b_wg = tl.load(p_gate, mask=m_k[:, None], other=0.0)
            b_wu = tl.load(p_up, mask=m_k[:, None], other=0.0)
        if DOT_FP32:
            b_x = b_x.to(tl.float32)
            b_wg = b_wg.to(tl.float32)
            b_wu = b_wu.to(tl.float32)
        b_gate = tl.dot(b_x, b_wg, b_gate, input_precision=PRECISION)
        b_up = tl.dot(b_x, b_wu, b_up, input_precision=PRECISION)
        p_x += BLOCK_K
        p_gate += BLOCK_K
        p_up += BLOCK_K
    b_h = (silu(b_gate) * b_up).to(Hidden.dtype.element_ty)
    # The tile's idle rows are stored too (they repeat token 0), so that the next product reads
    # numbers, not leftovers.
    p_h = Hidden + (i_m * BLOCK_M + o_m).to(tl.int64)[:, None] * s_h + o_n[None, :]
    tl.store(p_h, b_h, mask=(o_n < width)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _down_kernel(
    Hidden, W, Weights, Out, Rows, TileExpert, TileRows,
    num_tiles, width, depth,
    s_h, s_we, s_wn, s_o,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, WEIGHTED: tl.constexpr, DOT_FP32: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_m, i_n = _tile_of(tl.program_id(0), num_tiles, tl.cdiv(width, BLOCK_N), GROUP_M)
    num_rows = tl.load(TileRows + i_m)
    if num_rows == 0:
        return
    i_e = tl.load(TileExpert + i_m).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < num_rows
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    p_h = Hidden + (i_m * BLOCK_M + o_m).to(tl.int64)[:, None] * s_h + o_k[None, :]
    p_w = W + i_e * s_we + (o_n % width).to(tl.int64)[None, :] * s_wn + o_k[:, None]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, depth, BLOCK_K):
        if EVEN_K:
            b_h = tl.load(p_h)
            b_w = tl.load(p_w)
        else:
            m_k = k + o_k < depth
            b_h = tl.load(p_h, mask=m_k[None, :], other=0.0)
            b_w = tl.load(p_w, mask=m_k[:, None], other=0.0)
        if DOT_FP32:
            b_h = b_h.to(tl.float32)
            b_w = b_w.to(tl.float32)
        b_acc = tl.dot(b_h, b_w, b_acc, input_precision=PRECISION)
        p_h += BLOCK_K
        p_w += BLOCK_K
    b_slot = tl.load(Rows + i_m * BLOCK_M + o_m, mask=m_m, other=0).to(tl.int64)
    if WEIGHTED:
        b_acc *= tl.load(Weights + b_slot, mask=m_m, other=0.0)[:, None]
    p_o = Out + b_slot[:, None] * s_o + o_n[None, :]
    tl.store(p_o, b_acc.to(Out.dtype.element_ty), mask=m_m[:, None] & (o_n < width)[None, :])


@triton.jit
def _sum_kernel(
    Slots, Kept, Shared, Residual, Out, dim, s_s, s_sh, s_r, s_o,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_d < dim
    b_acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        kept = tl.load(Kept + i_t * TOP_K + j).to(tl.int32)  # 0 or 1
        p_slot = Slots + (i_t * TOP_K + j) * s_s + o_d
        b_acc += tl.load(p_slot, mask=o_d < dim * kept, other=0.0).to(tl.float32)
    if SHARED:
        b_acc += tl.load(Shared + i_t * s_sh + o_d, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        b_acc += tl.load(Residual + i_t * s_r + o_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(Out + i_t * s_o + o_d, b_acc.to(Out.dtype.element_ty), mask=mask)


def grouped_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    alignment: Alignment,
    top_k: int,
    weights: torch.Tensor | None = None,
    config: MoeConfig | None = None,
) -> torch.Tensor:
    """`down(silu(gate(x)) * up(x))` of each kept slot, by its expert's matrices and times its
    weight.

    x [tokens, dim]; gate_up [experts, 2 * inner, dim] (gates, then ups); down [experts, dim,
    inner]; weights [slots] fp32. Returns [slots, dim] in x's dtype; rows of dropped slots are
    undefined.
    """
    num_tokens, dim = x.shape
    num_experts, _, inner = down.shape
    arch = runtime.chip(x.device).arch
    config = config or moe_config(arch, x.element_size(), num_tokens * top_k / num_experts)
    num_tiles = alignment.tile_rows.shape[0]
    hidden = x.new_empty((num_tiles * alignment.block_m, inner))
    out = x.new_empty((num_tokens * top_k, dim))
    common = {
        "BLOCK_M": alignment.block_m, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "DOT_FP32": runtime.dot_in_fp32(x),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    tiles = (alignment.rows, alignment.tile_expert, alignment.tile_rows, num_tiles)
    runtime.launch(
        _gate_up_kernel, (num_tiles * runtime.cdiv(inner, config.block_n),),
        x, gate_up, hidden, *tiles, inner, dim, x.stride(0), *gate_up.stride()[:2],
        hidden.stride(0),
        TOP_K=top_k, BLOCK_N=config.block_n, EVEN_K=dim % config.block_k == 0, **common,
    )  # fmt: skip
    runtime.launch(
        _down_kernel, (num_tiles * runtime.cdiv(dim, 2 * config.block_n),),
        hidden, down, weights, out, *tiles, dim, inner, hidden.stride(0), *down.stride()[:2],
        out.stride(0),
        BLOCK_N=2 * config.block_n, EVEN_K=inner % config.block_k == 0,
        WEIGHTED=weights is not None, **common,
    )  # fmt: skip
    return out


def fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    *,
    capacity: int | None = None,
    shared_gate_up: torch.Tensor | None = None,
    shared_down: torch.Tensor | None = None,
    shared_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    config: MoeConfig | None = None,
) -> torch.Tensor:
    """The experts' weighted sum for every token, [tokens, dim] in x's dtype; products accumulate in
    fp32.

    x         [tokens, dim] fp16, bf16 or fp32.
    gate_up   [experts, 2 * inner, dim], gates first, then ups; down [experts, dim, inner]; x's
              dtype, last axis contiguous.
    routing   from `moe_router.route`: weights and experts [tokens, top_k].
    capacity  slots an expert takes (`moe_align.expert_capacity`): a choice past it adds nothing,
              and a token that loses all of them passes on its residual only (Switch, section 2.2).
    shared_*  experts that every token visits: gate_up [2 * shared_inner, dim], down [dim,
              shared_inner], weighted per token by shared_weight [tokens] fp32 (1 by default).
              Several shared experts are one wide one.
    residual  [tokens, dim], added to the result.
    """
    num_tokens, dim = x.shape
    num_experts, _, inner = down.shape
    top_k = routing.experts.shape[1]
    runtime.one_of("x dtype", x.dtype, runtime.FLOAT_TYPES)
    runtime.expect_shape("gate_up", gate_up, num_experts, 2 * inner, dim)
    runtime.expect_shape("down", down, num_experts, dim, inner)
    runtime.expect_shape("routing.experts", routing.experts, num_tokens, top_k)
    runtime.expect_shape("routing.weights", routing.weights, num_tokens, top_k)
    if (shared_gate_up is None) != (shared_down is None):
        raise ValueError("shared_gate_up and shared_down belong together")
    if shared_gate_up is not None and shared_down is not None:
        runtime.expect_shape("shared_down", shared_down, dim, None)
        runtime.expect_shape("shared_gate_up", shared_gate_up, 2 * shared_down.shape[1], dim)
    elif shared_weight is not None:
        raise ValueError("shared_weight needs shared_gate_up and shared_down")
    if shared_weight is not None:
        runtime.expect_shape("shared_weight", shared_weight, num_tokens)
    if residual is not None:
        runtime.expect_shape("residual", residual, num_tokens, dim)
        runtime.unit_stride("residual", residual)
    for name, tensor in (("x", x), ("gate_up", gate_up), ("down", down)):
        runtime.one_of(f"{name} dtype", tensor.dtype, (x.dtype,))
        runtime.unit_stride(name, tensor)

    arch = runtime.chip(x.device).arch
    chosen = config or moe_config(arch, x.element_size(), num_tokens * top_k / num_experts)
    alignment = align(routing.experts, num_experts, chosen.block_m, capacity)
    slots = grouped_mlp(x, gate_up, down, alignment, top_k, routing.weights.reshape(-1), chosen)
    shared = None
    if shared_gate_up is not None and shared_down is not None:
        chosen = config or moe_config(arch, x.element_size(), num_tokens)
        everyone = torch.zeros((num_tokens, 1), dtype=torch.int32, device=x.device)
        one = align(everyone, 1, chosen.block_m)
        shared = grouped_mlp(
            x, shared_gate_up[None], shared_down[None], one, 1, shared_weight, chosen
        )
    out = torch.empty_like(x)
    block = min(2048, max(128, runtime.next_power_of_2(dim)))
    runtime.launch(
        _sum_kernel, (num_tokens, runtime.cdiv(dim, block)),
        slots, alignment.kept, shared, residual, out, dim,
        slots.stride(0), 0 if shared is None else shared.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        TOP_K=top_k, SHARED=shared is not None, RESIDUAL=residual is not None, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def fused_moe_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    *,
    capacity: int | None = None,
    shared_gate_up: torch.Tensor | None = None,
    shared_down: torch.Tensor | None = None,
    shared_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in float64, slot by slot."""

    def mlp(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (rows @ gate_up.to(torch.float64).T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ down.to(torch.float64).T

    x64 = x.to(torch.float64)
    out = torch.zeros_like(x64) if residual is None else residual.to(torch.float64).clone()
    taken = [0] * down.shape[0]
    for token in range(x.shape[0]):
        for weight, expert in zip(
            routing.weights[token].tolist(), routing.experts[token].tolist(), strict=True
        ):
            taken[expert] += 1
            if capacity is None or taken[expert] <= capacity:
                out[token] += weight * mlp(x64[token : token + 1], gate_up[expert], down[expert])[0]
    if shared_gate_up is not None and shared_down is not None:
        shared = mlp(x64, shared_gate_up, shared_down)
        out += (
            shared if shared_weight is None else shared * shared_weight.to(torch.float64)[:, None]
        )
    return out
