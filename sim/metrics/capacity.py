"""How many requests per second a replica can serve: its engine, kept saturated for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sim.engine.interface import Engine, RequestRecord, Status
from sim.metrics.distribution import NS
from sim.request import Request

MIN_WINDOW = 1000
"""Fewest completions to measure; the rate's standard error is then about 3 %."""
TURNOVERS = 4
"""Times the batch is replaced during the measurement, at least."""


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


def typical_requests(
    rows: Callable[[int], Request], order: list[int], most: int
) -> Iterator[Request]:
    """The requests `rows(i)` for `i` in `order`, from the start again as needed, `most` in all.

    Repeated requests get new numbers, so their private texts are new ones.
    """
    for k in range(most):
        request = rows(order[k % len(order)])
        request.uid = k
        request.id = str(k)
        request.arrival_ns = 0
        yield request
