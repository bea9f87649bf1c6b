"""The fused experts against the chip and against torch's grouped matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from calibrate.checks.attention import Check, Sizes
from calibrate.measure.bench import Bench
from calibrate.measure.points import Point
from calibrate.timing import measure


def moe_checks(
    bench: Bench, sizes: Sizes, product_tflops: float, aim: float = 0.6, torch_aim: float = 0.9
) -> list[Check]:
    """Achieved FLOP/s of the fused experts at a large batch, and their time against torch's."""
    hidden, inter, topk, experts = sizes.moe
    point = Point.of(
        "moe", dtype="bf16", tokens=sizes.moe_tokens, hidden=hidden, inter=inter, topk=topk,
        experts=experts, tp=1, ep=1, distribution="balanced",
    )  # fmt: skip
    ours = bench.time(point, 0.3)
    flops = 6 * sizes.moe_tokens * topk * hidden * inter
    tflops = flops / ours.us / 1e6
    found = [
        Check(
            f"fused MoE FLOP/s, {sizes.moe_tokens} tokens, {experts} experts, top {topk}",
            tflops / product_tflops,
            aim,
            f"{tflops:.1f} TFLOP/s of a product's {product_tflops:.1f}, {ours}",
        )
    ]
    name = "fused MoE against torch's grouped matrix product"
    call = _torch_grouped(bench.device, sizes)
    if call is None:
        return [*found, Check(name, None, None, "this torch has no grouped matrix product")]
    try:
        call()
        theirs = measure([call], bench.device, budget_s=0.3)
    except (RuntimeError, NotImplementedError) as error:
        return [*found, Check(name, None, None, str(error).splitlines()[0])]
    return [*found, Check(name, theirs.us / ours.us, torch_aim, f"theirs {theirs}")]


def _torch_grouped(device: torch.device, sizes: Sizes) -> Callable[[], Any] | None:
    """Gather by expert, two grouped products, and the weighted sum, as a torch program does it."""
    grouped: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is None:
        return None
    hidden, inter, topk, experts = sizes.moe
    slots = sizes.moe_tokens * topk

    def make(*size: int) -> torch.Tensor:
        scale = float(size[-1]) ** -0.5
        made: torch.Tensor = torch.randn(size, device=device) * scale
        return made.to(torch.bfloat16)

    x = make(sizes.moe_tokens, hidden)
    gate_up, down = make(experts, 2 * inter, hidden), make(experts, hidden, inter)
    chosen = (torch.arange(slots, device=device) % experts).view(-1, topk)
    weights = torch.full((slots, 1), 1 / topk, dtype=torch.bfloat16, device=device)

    @torch.inference_mode()
    def call() -> Any:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        ends = counts.cumsum(0).to(torch.int32)
        wide = grouped(x[order // topk], gate_up.transpose(1, 2), offs=ends)
        gate, up = wide.chunk(2, dim=-1)
        back = grouped(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
        out = torch.zeros_like(x)
        return out.index_add_(0, order // topk, back * weights)

    return call
