"""What it costs to start work on a device, and to look at a result."""

from __future__ import annotations

import time

import torch

from calibrate.timing import measure


def launch_overheads(device: torch.device, budget_s: float = 0.2) -> dict[str, float]:
    """Microseconds, by name:

    `launch`: one small operator, issued one after the other without waiting (on a GPU the host's
    time per launch, on a CPU the whole operator). `graph_node` (GPU): one more kernel in a
    replayed graph. `read`: one number brought to the host.
    """
    x = torch.zeros(1024, device=device)

    def many(count: int) -> None:
        for _ in range(count):
            x.add_(1.0)

    found: dict[str, float] = {}
    count = 200
    many(count)
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 5 or time.perf_counter() < end:
        _wait(device)
        start = time.perf_counter_ns()
        many(count)
        samples.append((time.perf_counter_ns() - start) / count / 1e3)
        _wait(device)
    found["launch"] = sorted(samples)[len(samples) // 2]
    if device.type == "cuda":
        one = measure([lambda: x.add_(1.0)], device, budget_s=budget_s)
        found["graph_node"] = one.us
    reads = []
    for _ in range(50):
        _wait(device)
        start = time.perf_counter_ns()
        x[0].item()
        reads.append((time.perf_counter_ns() - start) / 1e3)
    found["read"] = sorted(reads)[len(reads) // 2]
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
