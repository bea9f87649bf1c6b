"""The verdict on queues whose truth is known: one server, one token, fixed service time."""

from __future__ import annotations

import numpy as np
import pytest

from sim.metrics.capacity import Capacity
from sim.metrics.stability import Stability, assess

SERVICE_NS = 10_000_000  # 100 requests/s
TRUE = Capacity(100.0, 1000)


def served(arrival_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of first-come-first-served service by one server."""
    start = np.empty_like(arrival_ns)
    free = 0
    for i, at in enumerate(arrival_ns.tolist()):
        start[i] = max(at, free)
        free = start[i] + SERVICE_NS
    return start, start + SERVICE_NS


def poisson(rate: float, n: int, seed: int) -> np.ndarray:
    gaps = np.random.default_rng(seed).exponential(1e9 / rate, n)
    return np.cumsum(gaps).astype(np.int64)


def verdict(arrival_ns: np.ndarray, capacity: Capacity | None = TRUE) -> Stability:
    start, end = served(arrival_ns)
    return assess(arrival_ns, start, end, 0, capacity, 1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("rate", "expected"),
    [(30, "stable"), (70, "stable"), (95, "near-capacity"), (110, "unstable"), (200, "unstable")],
)
def test_verdict_of_a_long_run(rate: float, expected: str, seed: int) -> None:
    assert verdict(poisson(rate, 20_000, seed)).verdict == expected


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("rate", "expected"), [(30, "stable"), (300, "unstable")])
@pytest.mark.parametrize("n", [5, 50])
def test_verdict_of_a_short_trace_follows_the_load(
    rate: float, expected: str, n: int, seed: int
) -> None:
    arrival = np.arange(n) * round(1e9 / rate) + seed
    assert verdict(arrival).verdict == expected


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("rate", "stable"), [(30, True), (70, True), (115, False), (200, False)])
def test_verdict_without_a_capacity_rests_on_the_queue(
    rate: float, stable: bool, seed: int
) -> None:
    assert (verdict(poisson(rate, 20_000, seed), None).verdict == "stable") == stable


def test_a_queue_that_grows_is_unstable_whatever_the_average_capacity() -> None:
    """Two replicas by the estimate, but all requests go to one of them."""
    arrival = poisson(120, 20_000, 1)
    start, end = served(arrival)
    found = assess(arrival, start, end, 0, TRUE, 2)
    assert found.utilisation == pytest.approx(0.6, rel=0.03)
    assert found.verdict == "unstable"


def test_waves_above_the_capacity_are_near_capacity() -> None:
    quiet, busy = poisson(30, 30 * 600, 1), poisson(130, 130 * 300, 2)
    arrival = np.concatenate([quiet, quiet[-1] + busy, quiet[-1] + busy[-1] + quiet])
    found = verdict(arrival)
    assert found.utilisation is not None
    assert found.utilisation < 0.85
    assert found.verdict == "near-capacity"
    assert found.overloaded_fraction == pytest.approx(0.2, abs=0.05)


def test_a_queue_kept_short_by_rejections_is_near_capacity() -> None:
    arrival = poisson(150, 20_000, 1)
    kept = np.zeros(len(arrival), dtype=bool)
    start, end = np.full(len(arrival), -1), arrival.copy()
    free = 0
    for i, at in enumerate(arrival.tolist()):
        if free - at < 20 * SERVICE_NS:
            kept[i] = True
            start[i] = max(at, free)
            free = end[i] = start[i] + SERVICE_NS
    found = assess(arrival, start, end, int((~kept).sum()), TRUE, 1)
    assert found.verdict == "near-capacity"
    assert "turned away" in found.sentence


def test_rejections_far_below_the_capacity_are_said() -> None:
    arrival = poisson(30, 2000, 1)
    start, end = served(arrival)
    found = assess(arrival, start, end, 500, TRUE, 1)
    assert found.verdict == "stable"
    assert found.sentence.endswith("and 25% of the requests are turned away")


def test_requests_at_one_instant_have_no_rate() -> None:
    found = verdict(np.zeros(7, dtype=np.int64))
    assert found.offered_requests_per_s is None
    assert found.verdict == "stable"


def test_nothing_served_is_said() -> None:
    never = np.full(3, -1, dtype=np.int64)
    arrival = np.arange(3) * SERVICE_NS
    found = assess(arrival, never, arrival, 0, None, 1)
    assert found.sentence.startswith("no request was served")


def test_huge_loads_are_written_out() -> None:
    arrival = np.arange(50) * 3
    start, end = served(arrival)
    sentence = assess(arrival, start, end, 0, TRUE, 1).sentence
    assert "(333,333,333 of 100 requests/s, 333,333,333%)" in sentence
    assert "e+" not in sentence
