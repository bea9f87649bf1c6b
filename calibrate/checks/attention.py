"""The attention kernels against the chip, torch's attention, and attention without fusion."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from calibrate.measure.bench import Bench
from calibrate.measure.points import Point
from calibrate.timing import Timing, measure


@dataclass(frozen=True)
class Check:
    """One figure, and what was hoped for."""

    name: str
    value: float | None
    """A ratio; None when it could not be measured here."""
    aim: float | None
    detail: str

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.aim is None:
            return ""
        return "met" if self.value >= self.aim else "MISSED"


@dataclass(frozen=True)
class Sizes:
    """How large the comparisons are: a GPU's, or something a CPU can try the code with."""

    decode: tuple[tuple[int, int], ...]
    """(batch, context)"""
    prefill: int
    heads: int
    kv_heads: int
    head_dim: int
    growth: tuple[int, ...]
    """Sequence lengths for fused against unfused."""
    moe_tokens: int
    moe: tuple[int, int, int, int]
    """hidden, inter, topk, experts"""


GPU_SIZES = Sizes(
    decode=((32, 2048), (64, 2048), (32, 8192), (128, 4096)), prefill=8192, heads=32, kv_heads=8,
    head_dim=128, growth=(512, 1024, 2048, 4096, 8192), moe_tokens=8192, moe=(2048, 768, 8, 128),
)  # fmt: skip
CPU_SIZES = Sizes(
    decode=((4, 64),), prefill=64, heads=4, kv_heads=2, head_dim=64, growth=(32, 64), moe_tokens=16,
    moe=(64, 64, 2, 4),
)  # fmt: skip


def decode_checks(bench: Bench, sizes: Sizes, copy_gb_s: float, aim: float = 0.85) -> list[Check]:
    """Achieved bandwidth of paged decode: the bytes of keys, values, queries and outputs."""
    found = []
    for batch, context in sizes.decode:
        point = _attention_point("attn_decode", sizes, batch=batch, kv_len=context)
        timing = bench.time(point, 0.2)
        kv = 2 * batch * context * sizes.kv_heads * sizes.head_dim * 2
        moved = kv + 2 * batch * sizes.heads * sizes.head_dim * 2
        rate = moved / timing.us / 1e3
        text = f"{rate:.0f} GB/s of a copy's {copy_gb_s:.0f}, {timing}"
        name = f"paged decode bandwidth, batch {batch}, context {context}"
        found.append(Check(name, rate / copy_gb_s, aim, text))
    return found


def prefill_checks(
    bench: Bench, sizes: Sizes, product_tflops: float, aim: float = 0.55, torch_aim: float = 0.9
) -> list[Check]:
    """Achieved FLOP/s of paged prefill, and its time against torch's attention on dense tensors of
    the same shape."""
    q = sizes.prefill
    point = _attention_point("attn_prefill", sizes, batch=1, q_len=q, prefix=0)
    timing = bench.time(point, 0.3)
    tflops = 4 * sizes.head_dim * sizes.heads * q * q / 2 / timing.us / 1e6
    found = [
        Check(
            f"prefill FLOP/s, {q} tokens, head {sizes.head_dim}",
            tflops / product_tflops,
            aim,
            f"{tflops:.1f} TFLOP/s of a product's {product_tflops:.1f}, {timing}",
        )
    ]
    backends = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    for name, backend in backends.items():
        other = _sdpa(bench.device, sizes, q, backend)
        if isinstance(other, str):
            found.append(Check(f"prefill against torch's {name}", None, None, other))
            continue
        goal = torch_aim if backend is SDPBackend.FLASH_ATTENTION else None
        found.append(
            Check(f"prefill against torch's {name}", other.us / timing.us, goal, f"theirs {other}")
        )
    return found


def decode_against_torch(bench: Bench, sizes: Sizes, aim: float = 0.9) -> list[Check]:
    """Paged decode against torch's FlashAttention-2 on dense caches of the same lengths."""
    batch, context = sizes.decode[0]
    ours = bench.time(_attention_point("attn_decode", sizes, batch=batch, kv_len=context), 0.2)
    q, k, v = _dense(bench.device, sizes, batch, 1, context)
    other = _time_sdpa(bench.device, q, k, v, SDPBackend.FLASH_ATTENTION, causal=False)
    name = f"decode against torch's FlashAttention-2, batch {batch}, context {context}"
    if isinstance(other, str):
        return [Check(name, None, None, other)]
    return [Check(name, other.us / ours.us, aim, f"ours {ours}; theirs {other}")]


def growth_checks(bench: Bench, sizes: Sizes, aim: float = 2.0) -> list[Check]:
    """Time and peak memory of fused and unfused attention as the sequence grows: the fused one's
    extra memory stays linear, and it is at least twice as fast from 1,024 tokens on."""
    device, found = bench.device, []
    memory: list[tuple[int, float]] = []
    for q in sizes.growth:
        point = _attention_point("attn_prefill", sizes, batch=1, q_len=q, prefix=0)
        fused = bench.time(point, 0.1)
        unfused = _unfused(device, sizes, q)
        plain = measure([unfused], device, budget_s=0.1, warm_up_s=0.03)
        ours, theirs = _extra_bytes(device, bench.call(point)), _extra_bytes(device, unfused)
        seen = ""
        if ours is not None and theirs is not None:
            memory.append((q, ours))
            seen = f"; extra memory {ours / 2**20:.1f} MiB against {theirs / 2**20:.0f} MiB"
        found.append(
            Check(
                f"fused against unfused attention, {q} tokens",
                plain.us / fused.us,
                aim if q >= 1024 else None,
                f"{fused.us:.0f} us against {plain.us:.0f} us{seen}",
            )
        )
    if len(memory) >= 2:
        found.append(_memory_check(memory[0], memory[-1]))
    return found


def _memory_check(first: tuple[int, float], last: tuple[int, float]) -> Check:
    """Extra memory against linear growth; below a megabyte there is nothing to compare."""
    (short, small), (long, large) = first, last
    allowed = long / short * max(small, 2.0**20)
    return Check(
        "fused attention's extra memory grows no faster than the sequence",
        allowed / max(large, 2.0**20),
        1.0,
        f"{small / 2**20:.2f} MiB at {short} tokens, {large / 2**20:.2f} MiB at {long}",
    )


def _attention_point(op: str, sizes: Sizes, **columns: Any) -> Point:
    return Point.of(
        op, dtype="bf16", kv_dtype="bf16", heads=sizes.heads, kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim, **columns,
    )  # fmt: skip


def _dense(
    device: torch.device, sizes: Sizes, batch: int, q: int, context: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def make(heads: int, tokens: int) -> torch.Tensor:
        made = torch.randn(batch, heads, tokens, sizes.head_dim, device=device)
        return made.to(torch.bfloat16)

    return (
        make(sizes.heads, q), make(sizes.kv_heads, context), make(sizes.kv_heads, context)
    )  # fmt: skip


def _sdpa(device: torch.device, sizes: Sizes, q: int, backend: SDPBackend) -> Timing | str:
    return _time_sdpa(device, *_dense(device, sizes, 1, q, q), backend, causal=True)


def _time_sdpa(
    device: torch.device,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    backend: SDPBackend,
    causal: bool,
) -> Timing | str:
    """Or why it cannot run here, in one line."""
    # Heads are repeated beforehand where a backend may not know GQA; that is not timed.
    group = q.shape[1] // k.shape[1]
    if backend is SDPBackend.CUDNN_ATTENTION and group > 1:
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        group = 1

    @torch.inference_mode()
    def call() -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=group > 1)

    try:
        call()
        return measure([call], device, budget_s=0.2)
    except RuntimeError as error:
        return str(error).splitlines()[0]


def _unfused(device: torch.device, sizes: Sizes, q: int) -> Callable[[], Any]:
    query, key, value = _dense(device, sizes, 1, q, q)
    group = sizes.heads // sizes.kv_heads

    @torch.inference_mode()
    def call() -> Any:
        k, v = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = query @ k.transpose(-1, -2) * sizes.head_dim**-0.5
        hidden = torch.ones(q, q, dtype=torch.bool, device=device).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v

    return call


def _extra_bytes(device: torch.device, call: Callable[[], Any]) -> float | None:
    """Memory at the peak of a call beyond its inputs; None where the device does not count."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device) - before)
