"""SiLU-and-multiply: the activation of SwiGLU (Shazeer 2020)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import runtime


@triton.jit
def silu(x):
    """x * sigmoid(x), fp32."""
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _silu_and_mul_kernel(X, Out, dim, s_x, s_o, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_d < dim
    b_gate = tl.load(X + i_row * s_x + o_d, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(X + i_row * s_x + dim + o_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(Out + i_row * s_o + o_d, (silu(b_gate) * b_up).to(Out.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[tokens, 2 * dim] (gates, then ups) -> silu(gate) * up, [tokens, dim] in x's dtype."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x: expected shape (tokens, 2 * dim), got {tuple(x.shape)}")
    runtime.one_of("x dtype", x.dtype, runtime.FLOAT_TYPES)
    tokens, dim = x.shape[0], x.shape[1] // 2
    if out is None:
        out = x.new_empty((tokens, dim))
    runtime.expect_shape("out", out, tokens, dim)
    runtime.unit_stride("x", x)
    runtime.unit_stride("out", out)
    block = min(2048, max(128, runtime.next_power_of_2(dim)))
    runtime.launch(
        _silu_and_mul_kernel, (tokens, runtime.cdiv(dim, block)),
        x, out, dim, x.stride(0), out.stride(0), BLOCK=block, num_warps=max(1, block // 512),
    )  # fmt: skip
    return out


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """The same in float64."""
    gate, up = x.to(torch.float64).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
