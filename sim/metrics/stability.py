"""Is the answer one that lasts? Offered load against capacity, and what the queue did.

In an unstable system the queue grows for as long as requests come, so every latency depends on
how long one looks. The verdict rests on two independent things: the utilisation (offered rate
over the capacity measured by a saturated run of the same requests) and the queue's growth in this
very run. The first decides for short traces, in which no queue has time to grow; the second
catches what the first cannot know: uneven routing, load that comes in waves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from sim.format import duration, rate
from sim.metrics.capacity import Capacity
from sim.metrics.distribution import NS, FloatArray, IntArray

STABLE, NEAR, UNSTABLE = "stable", "near-capacity", "unstable"

NEAR_UTILISATION = 0.85
"""From here on waiting grows steeply with load: at 0.85 an M/M/1 queue holds 5.7 requests."""
TOLERANCE = 0.03
"""Relative uncertainty of a measured capacity."""
SAMPLES = 400
LONG_RUN = 8
"""The queue's growth is evidence when arrivals last this many times a typical service."""
WINDOW_S = 60.0
WINDOW_REQUESTS = 400
"""Windows for a load that varies: at least a minute, and enough requests (5 % of counting noise)
not to take chance for load."""


@dataclass
class Stability:
    """The summary's `stability` section. Rates in requests/s of the whole cluster."""

    verdict: str
    offered_requests_per_s: float | None
    """Arrivals over the time from the first to the last; None for a single instant."""
    served_requests_per_s: float | None
    """Requests that left (completed or not) over the same time, and the drain after it."""
    capacity_requests_per_s: float | None
    """What is served once a queue has built up. Until then a batch that is not full may be more
    efficient, so a load a little above this can go well for a while, but not recover."""
    utilisation: float | None
    overloaded_fraction: float | None
    """Part of the time in which more arrived, over a minute or so, than can be served."""
    queue_growth_per_s: float | None
    """Slope of the number of requests waiting for their first step, while requests come."""
    waiting_at_last_arrival: int
    max_waiting: int
    turned_away_fraction: float
    """Of the requests, those that admission refused. One that no engine could serve (its prompt is
    longer than the context or than all KV blocks) is not among them: it costs nothing."""
    timeout_fraction: float
    """Of the requests, those whose clients gave up."""
    capacity_probe_requests: int
    sentence: str = ""


def assess(
    arrival_ns: IntArray,
    scheduled_ns: IntArray,
    done_ns: IntArray,
    rejected: int,
    capacity: Capacity | None,
    replicas: int,
    timeouts: int = 0,
) -> Stability:
    """The verdict for requests that arrived at `arrival_ns`, first ran at `scheduled_ns` (-1:
    never) and left at `done_ns` (-1: not). `rejected` were turned away at the door; the clients of
    `timeouts` gave up."""
    n = len(arrival_ns)
    first, last = (int(arrival_ns.min()), int(arrival_ns.max())) if n else (0, 0)
    span_s = (last - first) / NS
    offered = (n - 1) / span_s if span_s > 0 else None
    limit = capacity.requests_per_s * replicas if capacity is not None else None
    load = offered / limit if offered is not None and limit else None
    end = max(int(done_ns.max(initial=0)), last)
    waiting = _Waiting.during(arrival_ns, scheduled_ns, done_ns, first, last)
    stability = Stability(
        verdict=STABLE,
        offered_requests_per_s=offered,
        served_requests_per_s=int((done_ns >= 0).sum()) / ((end - first) / NS)
        if end > first
        else None,
        capacity_requests_per_s=limit,
        utilisation=load,
        overloaded_fraction=_overloaded(arrival_ns, first, last, limit),
        queue_growth_per_s=waiting.slope_per_s,
        waiting_at_last_arrival=waiting.at_end,
        max_waiting=waiting.most,
        turned_away_fraction=rejected / n if n else 0.0,
        timeout_fraction=timeouts / n if n else 0.0,
        capacity_probe_requests=capacity.requests if capacity is not None else 0,
    )
    service_s = _typical_s(scheduled_ns, done_ns)
    long = span_s >= LONG_RUN * service_s and n >= 200
    _judge(stability, waiting, long, span_s)
    if n and not (scheduled_ns >= 0).any() and stability.verdict == STABLE:
        stability.sentence = "no request was served, so nothing is known of the load"
    return stability


def _judge(s: Stability, waiting: _Waiting, long: bool, span_s: float) -> None:
    """Fill in verdict and sentence."""
    load, over = s.utilisation, s.overloaded_fraction or 0.0
    growing = long and waiting.grows(s.offered_requests_per_s)
    lost = s.turned_away_fraction + s.timeout_fraction
    how = "turned away" if s.turned_away_fraction >= s.timeout_fraction else "given up"
    if lost > 0.01 and (load is None or load >= NEAR_UTILISATION):
        s.verdict = NEAR
        s.sentence = (
            f"the queue stays finite because {lost:.0%} of the requests are {how}{_of_capacity(s)}"
        )
    elif load is not None and load >= 1 - TOLERANCE and growing:
        s.verdict = UNSTABLE
        s.sentence = f"more arrives than can be served{_of_capacity(s)}, and the queue grows"
    elif load is not None and load >= 1 + TOLERANCE:
        calm = long and waiting.at_end <= 0.01 * s.max_waiting + 2
        s.verdict = NEAR if calm else UNSTABLE
        if calm:
            s.sentence = (
                f"the load is at the estimated capacity{_of_capacity(s)}, yet the queue cleared"
            )
        elif long:
            s.sentence = f"more arrives than can be served{_of_capacity(s)}"
        else:
            s.sentence = (
                f"more arrives than can be served{_of_capacity(s)}; the trace is short "
                f"({duration(span_s)}): {s.waiting_at_last_arrival:,} requests were waiting when "
                f"its last one arrived"
            )
    elif growing:
        s.verdict = UNSTABLE
        s.sentence = f"the queue grows by {rate(s.queue_growth_per_s)} requests/s"
        if load is not None:
            s.sentence += f" although{_of_capacity(s)}: the load is uneven over replicas or time"
    elif load is not None and load >= NEAR_UTILISATION:
        s.verdict = NEAR
        s.sentence = (
            f"the load is near the capacity{_of_capacity(s)}: waiting times are sensitive to "
            f"small changes of either"
        )
    elif over > 0.02:
        s.verdict = NEAR
        s.sentence = (
            f"on average the load can be served{_of_capacity(s)}, but for {over:.0%} of the time "
            f"more arrives than that"
        )
    elif load is not None:
        s.sentence = f"the load can be served{_of_capacity(s)}"
    elif s.offered_requests_per_s is None:
        s.sentence = "requests at a single instant have no rate to compare"
    else:
        s.sentence = "the queue does not grow"
    if s.verdict == STABLE and lost > 0.01:
        s.sentence += f", and {lost:.0%} of the requests are {how}"
    if s.verdict == UNSTABLE:
        s.sentence += "; latencies depend on how long you look"


def _of_capacity(s: Stability) -> str:
    if s.utilisation is None:
        return ""
    return (
        f" ({rate(s.offered_requests_per_s)} of {rate(s.capacity_requests_per_s)} requests/s, "
        f"{s.utilisation:,.0%})"
    )


@dataclass
class _Waiting:
    """Requests that wait for their first step, sampled while requests arrive."""

    counts: FloatArray
    slope_per_s: float | None
    at_end: int
    most: int

    @classmethod
    def during(
        cls, arrival: IntArray, scheduled: IntArray, done: IntArray, first: int, last: int
    ) -> _Waiting:
        if last <= first:
            return cls(np.zeros(0), None, 0, 0)
        at = np.linspace(first, last, SAMPLES + 1)[1:]
        never = np.iinfo(np.int64).max
        started = np.where(scheduled >= 0, scheduled, np.where(done >= 0, done, never))
        counts = np.searchsorted(np.sort(arrival), at, side="right") - np.searchsorted(
            np.sort(started), at, side="right"
        )
        late = slice(SAMPLES // 5, None)
        t = (at[late] - at[late].mean()) / NS
        slope = float(np.dot(t, counts[late]) / np.dot(t, t))
        return cls(counts.astype(np.float64), slope, int(counts[-1]), int(counts.max()))

    def grows(self, offered: float | None) -> bool:
        """Is there a trend that a stable queue's excursions would not show? The last quarter
        must hold more than the second ever did on average, never clear, and the trend must eat a
        noticeable part of what arrives."""
        if offered is None or self.slope_per_s is None:
            return False
        _, second, third, fourth = (q.mean() for q in np.array_split(self.counts, 4))
        lowest = self.counts[-SAMPLES // 4 :].min()
        rising = second < third < fourth and lowest > max(second, 10)
        return bool(rising and self.slope_per_s > 0.01 * offered)


def _overloaded(arrival: IntArray, first: int, last: int, limit: float | None) -> float | None:
    """Part of the windows in which arrivals exceed the capacity beyond chance and tolerance."""
    span_s = (last - first) / NS
    if limit is None or span_s <= 0:
        return None
    window_s = max(WINDOW_S, WINDOW_REQUESTS / limit)
    count = int(span_s // window_s)
    if count < 2:
        return None
    # Only windows in which something arrives are looked at: years may have a handful of those.
    window = (arrival - first) // round(window_s * NS)
    per_window = np.unique(window[(window >= 0) & (window < count)], return_counts=True)[1]
    return float(np.count_nonzero(per_window > limit * window_s * (1 + TOLERANCE)) / count)


def _typical_s(scheduled: IntArray, done: IntArray) -> float:
    """Median time in service of those that left, seconds (waiting does not count: that is what
    is being judged)."""
    served = (done >= 0) & (scheduled >= 0)
    return float(np.median((done - scheduled)[served])) / NS if served.any() else 0.0


def as_section(stability: Stability) -> dict[str, object]:
    return asdict(stability)
