"""How the kernels are started: which chip, which precision, interpreted or compiled.

Every wrapper in this folder ends in `runtime.launch`, and asks `runtime.chip` for what it picks its
tiles by. The compilation test replaces these two to see exactly what the wrappers would launch on a
chip that is not there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8 = torch.float8_e4m3fn


class Chip(NamedTuple):
    """What tile choices depend on. `arch`: 80 is A100, 89 L40S and RTX 4090, 90 H100 and H200."""

    arch: int
    num_sms: int


def chip(device: torch.device) -> Chip:
    """The GPU behind `device`; interpreted runs take the H100's choices, to test them."""
    if device.type != "cuda":
        return Chip(arch=90, num_sms=132)
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.major * 10 + properties.minor, properties.multi_processor_count)


def interpreted(kernel: Any) -> bool:
    """Whether `kernel` was decorated with TRITON_INTERPRET=1 set: numpy runs it, on CPU tensors."""
    return not isinstance(kernel, triton.JITFunction)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 1,
    **constants: Any,
) -> None:
    """Run `kernel` over `grid` programs. Tensors on the CPU need the interpreter.

    ValueError when no program could run there: a CPU tensor for a compiled kernel.
    """
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if device.type == "cpu" and not interpreted(kernel):
        raise ValueError(
            "these tensors are on the CPU: move them to a CUDA device, or set TRITON_INTERPRET=1 "
            "before the first import of kernels to run in Triton's (slow) interpreter"
        )
    if 0 in grid:
        return
    kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, **constants)


def dot_in_fp32(*tensors: torch.Tensor) -> bool:
    """Whether to widen `tl.dot` operands: the interpreter multiplies bf16 bits as integers."""
    return tensors[0].device.type == "cpu" and any(t.dtype == torch.bfloat16 for t in tensors)


def unit_stride(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless the last axis of `tensor` is contiguous; every other stride is free."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"{name}: the last axis must be contiguous, its stride is {tensor.stride(-1)}"
        )


def one_of(name: str, value: Any, supported: tuple[Any, ...]) -> None:
    """ValueError that lists what is supported unless `value` is among it."""
    if value not in supported:
        known = ", ".join(str(v).removeprefix("torch.") for v in supported)
        raise ValueError(
            f"{name} {str(value).removeprefix('torch.')} is not supported; supported: {known}"
        )


def expect_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """ValueError unless `tensor` has this shape; None stands for any length."""
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, actual, strict=False)
    ):
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: expected shape ({wanted}), got {actual}")


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (and 1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)
