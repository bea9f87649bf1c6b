"""Traces from traces: parts of them, at another rate, with other arrivals. All return new ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sim.errors import UserError
from sim.request import Segment, Trace, output_key, prompt_key

from .arrivals import MAX_REQUESTS, MAX_SECONDS, ArrivalProcess
from .segments import SegmentTable

Ints = npt.NDArray[np.int64]


def limit(trace: Trace, n: int) -> Trace:
    """The first `n` requests (all when there are fewer)."""
    if n < 1:
        raise UserError(f"limit must be at least 1 request, not {n}")
    if n >= len(trace):
        return trace
    return _counted(take(trace, np.arange(n)), rows_over_limit=len(trace) - n)


def window(trace: Trace, start_s: float | None = None, end_s: float | None = None) -> Trace:
    """Requests with start_s <= arrival < end_s (seconds, on the trace's clock); time 0 becomes
    `start_s`. Raises UserError when there are none."""
    start_ns, end_ns = window_ns(start_s, end_s)
    high = np.iinfo(np.int64).max if end_ns is None else end_ns
    first, last = np.searchsorted(trace.arrival_ns, [start_ns, high], side="left").tolist()
    if first == last:
        span = f"{trace.arrival_ns[-1] / 1e9:.3f} s" if len(trace) else "nothing"
        raise UserError(f"{trace.name}: no requests in that window; arrivals span 0 to {span}")
    part = take(trace, np.arange(first, last))
    part = replace(part, arrival_ns=part.arrival_ns - start_ns)
    return _counted(part, rows_outside_window=len(trace) - len(part))


def scale_rate(trace: Trace, factor: float) -> Trace:
    """Arrivals `factor` times as fast; each time is rounded to the nanosecond once."""
    check_rate_scale(factor)
    if factor == 1:
        return trace
    scaled = trace.arrival_ns / factor
    if len(scaled) and scaled[-1] > MAX_SECONDS * 1e9:
        raise UserError(f"rate scale {factor:g}: the last arrival is beyond the 64-bit clock")
    return replace(trace, arrival_ns=np.rint(scaled).astype(np.int64))


def with_arrivals(
    trace: Trace, process: ArrivalProcess, seed: int | np.random.Generator = 0
) -> Trace:
    """The same requests in the same order, arriving by `process`."""
    if len(trace) > MAX_REQUESTS:
        raise UserError(f"{trace.name}: more than {MAX_REQUESTS} requests")
    arrival_ns = process.first(len(trace), np.random.default_rng(seed))
    return _counted(replace(trace, arrival_ns=arrival_ns), arrivals_generated=len(trace))


def take(trace: Trace, rows: Ints) -> Trace:
    """The requests in these rows, in this order (ascending, to stay sorted), numbered anew."""

    def picked(cells: Sequence[str] | None) -> list[str] | None:
        return None if cells is None else [cells[i] for i in rows.tolist()]

    return replace(
        trace,
        arrival_ns=trace.arrival_ns[rows],
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        segments=None if trace.segments is None else _take_segments(trace.segments, rows),
        ids=picked(trace.ids),
        priority=None if trace.priority is None else trace.priority[rows],
        tenant=picked(trace.tenant),
        session=picked(trace.session),
    )


def _take_segments(
    segments: Sequence[tuple[Segment, ...]], rows: Ints
) -> Sequence[tuple[Segment, ...]]:
    if isinstance(segments, SegmentTable):
        return segments.take(rows)
    # private texts are named by row number: those of rows that stay follow them, those of rows
    # that are gone become shared texts of their own
    new = {}
    for to, row in enumerate(rows.tolist()):
        new[prompt_key(row)] = prompt_key(to)
        new[output_key(row)] = output_key(to)
    taken = [segments[row] for row in rows.tolist()]
    free = 1 + max((part.content for parts in taken for part in parts), default=0)
    result = []
    for parts in taken:
        for part in parts:
            if part.content < 0 and part.content not in new:
                new[part.content] = max(free, 0)
                free = max(free, 0) + 1
        result.append(tuple(p._replace(content=new.get(p.content, p.content)) for p in parts))
    return result


def window_ns(start_s: float | None, end_s: float | None) -> tuple[int, int | None]:
    """Window bounds in nanoseconds; raises UserError for a bad one."""
    start, end = 0.0 if start_s is None else start_s, math.inf if end_s is None else end_s
    if not (0 <= start < end and start < 4e9):
        raise UserError(f"time window: needs 0 <= start < end in seconds, not {start:g} to {end:g}")
    return round(start * 1e9), None if end > 4e9 else round(end * 1e9)


def check_rate_scale(factor: float) -> None:
    if not 1e-9 <= factor <= 1e9:
        raise UserError(f"rate scale must be above 0, from 1e-9 to 1e9, not {factor:g}")


def _counted(trace: Trace, **counts: int) -> Trace:
    return replace(trace, counts={**trace.counts, **counts})
