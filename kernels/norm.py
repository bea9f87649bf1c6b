"""RMSNorm (Zhang and Sennrich 2019): plain, with the residual added first, or over heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import runtime

MAX_DIM = 16384


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    X, Residual, Weight, Out, eps, num_rows, inner,
    s_xo, s_xi, s_ro, s_ri, s_oo, s_oi,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, DIM_PAD)
    mask = (o_row < num_rows)[:, None] & (o_d < DIM)[None, :]
    outer = (o_row // inner).to(tl.int64)
    inside = o_row % inner
    # [ROWS, DIM_PAD]
    b_x = tl.load(
        X + (outer * s_xo + inside * s_xi)[:, None] + o_d[None, :], mask=mask, other=0.0
    ).to(tl.float32)
    if ADD:
        p_r = Residual + (outer * s_ro + inside * s_ri)[:, None] + o_d[None, :]
        b_x += tl.load(p_r, mask=mask, other=0.0).to(tl.float32)
        # Norm what the next layer will read: the sum as it is stored.
        b_sum = b_x.to(Residual.dtype.element_ty)
        tl.store(p_r, b_sum, mask=mask)
        b_x = b_sum.to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / DIM + eps)
    b_w = tl.load(Weight + o_d, mask=o_d < DIM, other=0.0).to(tl.float32)
    b_out = b_x * b_rstd[:, None] * b_w[None, :]
    p_out = Out + (outer * s_oo + inside * s_oi)[:, None] + o_d[None, :]
    tl.store(p_out, b_out.to(Out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; sums in fp32. Returns `out` in x's
    shape and dtype.

    x         [tokens, dim] or [tokens, heads, dim], dim up to 16384, last axis contiguous.
    weight    [dim].
    residual  x's shape: becomes residual + x in place, and that sum is normalised.
    out       where to write; may be `x` itself.
    """
    dim = x.shape[-1]
    if x.dim() not in (2, 3) or not 1 <= dim <= MAX_DIM:
        raise ValueError(
            f"x of shape {tuple(x.shape)} is not supported; supported: "
            f"[tokens, dim] and [tokens, heads, dim], dim up to {MAX_DIM}"
        )
    runtime.one_of("x dtype", x.dtype, runtime.FLOAT_TYPES)
    runtime.expect_shape("weight", weight, dim)
    if out is None:
        out = torch.empty_like(x)
    for name, tensor in (("x", x), ("residual", residual), ("out", out)):
        if tensor is not None:
            runtime.expect_shape(name, tensor, *x.shape)
            runtime.unit_stride(name, tensor)
    inner = x.shape[1] if x.dim() == 3 else 1

    def strides(tensor: torch.Tensor | None) -> tuple[int, int]:
        if tensor is None:
            return 0, 0
        return (tensor.stride(0), tensor.stride(1)) if tensor.dim() == 3 else (tensor.stride(0), 0)

    dim_pad = runtime.next_power_of_2(dim)
    rows = max(1, min(16, 1024 // dim_pad))
    num_rows = x.shape[0] * inner
    runtime.launch(
        _rms_norm_kernel, (runtime.cdiv(num_rows, rows),),
        x, residual, weight, out, eps, num_rows, inner, *strides(x), *strides(residual),
        *strides(out),
        DIM=dim, DIM_PAD=dim_pad, ROWS=rows, ADD=residual is not None,
        num_warps=max(1, min(16, dim_pad * rows // 512)),
    )  # fmt: skip
    return out


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in float64, the sum with the residual rounded to its dtype; nothing in place."""
    if residual is not None:
        x = (x.to(torch.float64) + residual.to(torch.float64)).to(residual.dtype)
    x = x.to(torch.float64)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(torch.float64)
