"""How long one call takes on a device: warm, with cold caches, and with its spread.

On an NVIDIA GPU a call is timed with CUDA events: by default inside a replayed CUDA graph of
several calls with different inputs (no launch time, no reuse of the L2 cache), else eagerly with
the L2 cache flushed before every call. On the CPU it is a clock around calls: the thread's own CPU
time with one thread (see `calibrate.engine.clock`), else `time.perf_counter_ns`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from calibrate.engine.clock import work_clock

Call = Callable[[], Any]
Method = Literal["graph", "events", "clock"]

NOISY_SPREAD = {"cuda": 0.08, "cpu": 0.25}
"""Spread above which a point is noisy; a quiet CPU core shared with nobody stays under 0.1."""
NOISY_DRIFT = {"cuda": 0.05, "cpu": 0.25}
MIN_SAMPLES = 5
FLUSH_BYTES = 256 * 2**20
"""More than any L2 cache (50 MB on Hopper)."""


@dataclass(frozen=True)
class Timing:
    """Time of one call, microseconds. Ask `noisy` before believing `us`."""

    us: float
    """Median over the samples."""
    mean_us: float
    spread: float
    """Half the range of the middle 68 % of samples, relative to the median."""
    drift: float
    """Relative difference between the medians of the first and the second half."""
    samples: int
    method: Method
    noisy: str = ""
    """Why this point should not be trusted; empty when it may."""

    def __str__(self) -> str:
        text = f"{self.us:.1f} us ± {self.spread:.0%} ({self.samples} samples, {self.method})"
        return f"{text}, NOISY: {self.noisy}" if self.noisy else text


def measure(
    calls: Sequence[Call],
    device: torch.device | str = "cpu",
    *,
    budget_s: float = 0.2,
    warm_up_s: float = 0.05,
    method: Method | None = None,
    retries: int = 1,
) -> Timing:
    """Time one of `calls`, which do the same work on different inputs and are used in turn.

    A noisy measurement is repeated up to `retries` times with a longer budget and the best one
    is returned; if it is still noisy it says so. Raises ValueError for no calls or a method the
    device does not have; what a call raises passes through.
    """
    device = torch.device(device)
    if not calls:
        raise ValueError("nothing to measure: give at least one call")
    chosen: Method = method or ("graph" if device.type == "cuda" else "clock")
    if (chosen == "clock") == (device.type == "cuda"):
        raise ValueError(f"method {chosen!r} does not time calls on {device.type}")
    sampler = {"graph": _graph_samples, "events": _event_samples, "clock": _clock_samples}[chosen]
    best: Timing | None = None
    for attempt in range(1 + retries):
        samples = sampler(calls, device, budget_s * (1 + attempt), warm_up_s)
        timing = summarise(samples, device.type, chosen)
        if best is None or timing.spread + timing.drift < best.spread + best.drift:
            best = timing
        if not best.noisy:
            break
    if best is None:
        raise ValueError("retries must not be negative")
    return best


def summarise(samples_us: Sequence[float], kind: str, method: Method) -> Timing:
    """Median, spread and verdict of samples in the order in which they were taken."""
    values = np.asarray(samples_us, dtype=np.float64)
    median = float(np.median(values))
    low, high = np.percentile(values, [16, 84])
    half = len(values) // 2
    drift = 0.0
    if half >= 2:
        first, second = np.median(values[:half]), np.median(values[half:])
        drift = float(abs(second - first) / median)
    timing = Timing(
        us=median,
        mean_us=float(values.mean()),
        spread=float((high - low) / 2 / median),
        drift=drift,
        samples=len(values),
        method=method,
    )
    reasons = []
    if timing.samples < MIN_SAMPLES:
        reasons.append(f"only {timing.samples} samples")
    if timing.spread > NOISY_SPREAD[kind]:
        reasons.append(f"spread {timing.spread:.0%}")
    if timing.drift > NOISY_DRIFT[kind]:
        reasons.append(f"drift {timing.drift:.0%}")
    return replace(timing, noisy=", ".join(reasons))


def _warm_up(calls: Sequence[Call], seconds: float) -> float:
    """Run the calls in turn for some time, all of them at least once; seconds per call."""
    start = time.perf_counter()
    for count, call in enumerate(itertools.cycle(calls), start=1):
        call()
        elapsed = time.perf_counter() - start
        if count >= len(calls) and elapsed >= seconds:
            return elapsed / count
    raise AssertionError("cycle ended")


def _clock_samples(
    calls: Sequence[Call], device: torch.device, budget_s: float, warm_up_s: float
) -> list[float]:
    """Short calls are timed several at a time: the clock itself costs about 0.1 us."""
    each_s = _warm_up(calls, warm_up_s)
    inner = max(1, math.ceil(20e-6 / each_s))
    clock = work_clock(device)
    turn = itertools.cycle(calls)
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        batch = [next(turn) for _ in range(inner)]
        start = clock()
        for call in batch:
            call()
        samples.append((clock() - start) / inner / 1e3)
    return samples


def _event_samples(
    calls: Sequence[Call], device: torch.device, budget_s: float, warm_up_s: float
) -> list[float]:
    """Every call between two events, after a flush of the L2 cache. The flush keeps the device
    busy while the host launches the call, so launch time shows only in calls longer than it."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    _warm_up(calls, warm_up_s)
    torch.cuda.synchronize(device)
    turn = itertools.cycle(calls)
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        pairs = [(_event(), _event()) for _ in range(MIN_SAMPLES)]
        for before, after in pairs:
            flush.zero_()
            before.record()
            next(turn)()
            after.record()
        torch.cuda.synchronize(device)
        samples.extend(before.elapsed_time(after) * 1e3 for before, after in pairs)
    return samples


def _graph_samples(
    calls: Sequence[Call], device: torch.device, budget_s: float, warm_up_s: float
) -> list[float]:
    """All calls in one graph, replayed; the L2 cache is flushed before each replay, so give
    enough different inputs that they do not serve each other from it."""
    # Capture wants a side stream on which everything has been compiled and tuned before.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _warm_up(calls, warm_up_s)
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    repeats = max(1, math.ceil(8 / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    graph.replay()
    torch.cuda.synchronize(device)
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        before, after = _event(), _event()
        flush.zero_()
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize(device)
        samples.append(before.elapsed_time(after) * 1e3 / (repeats * len(calls)))
    return samples


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
