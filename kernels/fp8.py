"""e4m3 numbers inside Triton kernels, on chips with and without the conversion instructions.

Compute capability 8.9 and up converts in hardware; below it (A100) Triton refuses the type, and the
bits are taken apart with integer instructions instead. Tensors always travel as uint8 views, so
that one signature serves both. e4m3fn (OCP 8-bit FP v1.0): sign, 4 exponent bits with bias 7, 3
mantissa bits; largest 448; 0x7f is NaN; no infinity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

E4M3_MAX = 448.0


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """An e4m3 tensor as uint8, any other unchanged; the memory is shared."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def native(arch: int, device: torch.device) -> bool:
    """Whether the chip converts e4m3 itself. Interpreted runs take the integer way, to test it."""
    return arch >= 89 and device.type != "cpu"


@triton.jit
def decode_e4m3(x, NATIVE: tl.constexpr):
    """uint8 bits of e4m3 -> fp16, exactly (NaN codes become 480)."""
    if NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = x.to(tl.uint16)
        # The same fields at fp16's places, whose bias is 8 larger: 2**8. Right for subnormals too.
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """fp32 -> uint8 bits of e4m3, round to nearest even, saturating at +-448."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        magnitude = bits & 0x7FFFFFFF
        # Normal numbers: round at bit 20, to nearest even; then the bias goes from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Below 2**-6 the step is 2**-9: adding 2**14 leaves the rounded multiple in the low bits.
        shifted = tl.abs(x) + 16384.0
        subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)
        return (code | sign).to(tl.uint8)
