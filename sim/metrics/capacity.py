"""How many requests per second a replica can serve: its engine, kept saturated for a while."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sim.engine.interface import Engine, RequestRecord, Status
from sim.metrics.distribution import NS, IntArray
from sim.request import Request

MIN_WINDOW = 1000
"""Fewest completions to measure; the rate's standard error is then about 3 %."""
TURNOVERS = 4
"""Times the batch is replaced during the measurement, at least."""


R2 = (0.7548776662466927, 0.5698402909980532)
"""1/g and 1/g^2, g the plastic number: the two-dimensional golden ratios."""


@dataclass(frozen=True)
class Capacity:
    """What the saturated engine did in the measured window."""

    requests_per_s: float
    requests: int
    """Requests it is measured on."""
    mean_running: float


def measure_capacity(engine: Engine, source: Iterator[Request], backlog: int) -> Capacity | None:
    """Feed requests so that `backlog` always wait, until the rate of leaving is known.

    The engine must be fresh. The batch has turned over twice before the measurement starts, so
    that its requests are in all phases of their lives as they would be in the long run. Requests
    that the engine rejects count as served: they are part of the load. None when `source` ends
    before there is anything to measure.
    """
    left = 0
    finished = 0

    def on_finish(record: RequestRecord) -> None:
        nonlocal left, finished
        left += 1
        if record.status is Status.COMPLETED:
            finished += 1

    engine.on_finish = on_finish
    now = begun_ns = 0
    begun_left = area = peak = 0
    measuring = False
    more = True
    while more:
        while engine.num_waiting < backlog:
            request = next(source, None)
            if request is None:
                more = False
                break
            engine.submit(request, now)
        wake = engine.wake_ns()
        if wake is None:
            break
        # Newcomers knock at the instant of the next step: no step under way is cut short.
        area += engine.num_running * (wake - now) if measuring else 0
        now = wake
        engine.advance(now)
        peak = max(peak, engine.num_running)
        if not measuring:
            if finished >= 2 * peak > 0:
                measuring, begun_ns, begun_left = True, now, left
        elif left - begun_left >= max(MIN_WINDOW, TURNOVERS * peak):
            break
    if now == begun_ns or left == begun_left:
        return None
    elapsed = now - begun_ns
    return Capacity((left - begun_left) / (elapsed / NS), left - begun_left, area / elapsed)


def spread_evenly(first: IntArray, second: IntArray, count: int) -> IntArray:
    """Indices of `count` rows of which every stretch has the joint distribution of all rows.

    The rows are cut into strata by `first` and sorted by `second` within each; a low-discrepancy
    sequence (Roberts' R2) walks over both. A rate measured on a stretch is then far less noisy
    than one measured on as many consecutive rows.
    """
    n = len(first)
    strata = max(1, min(64, int(n**0.5)))
    stratum = np.empty(n, dtype=np.int64)
    stratum[np.argsort(first, kind="stable")] = np.arange(n) * strata // n
    order = np.lexsort((second, stratum))
    begin = np.searchsorted(stratum[order], np.arange(strata + 1))
    k = np.arange(count, dtype=np.float64)
    which = (k * R2[0] % 1.0 * strata).astype(np.int64)
    size = begin[which + 1] - begin[which]
    return order[begin[which] + (k * R2[1] % 1.0 * size).astype(np.int64)]
