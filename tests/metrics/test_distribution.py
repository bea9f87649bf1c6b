"""Percentiles, also of samples with counts, are numpy's of the samples written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics.distribution import describe, describe_weighted

SAMPLES = st.lists(st.tuples(st.integers(0, 10**10), st.integers(1, 9)), min_size=1, max_size=40)


@given(SAMPLES)
def test_weighted_is_the_same_as_written_out(samples: list[tuple[int, int]]) -> None:
    ns = np.array([value for value, _ in samples])
    counts = np.array([count for _, count in samples])
    half = len(ns) // 2
    weighted = describe_weighted([(ns[:half], counts[:half]), (ns[half:], counts[half:])])
    written = describe(np.repeat(ns, counts) / 1e9)
    assert weighted == pytest.approx(written, rel=1e-12, abs=1e-15)


def test_nothing_has_no_percentiles() -> None:
    empty = describe(np.zeros(0))
    assert empty["count"] == 0
    assert all(value is None for name, value in empty.items() if name != "count")
    assert describe_weighted([(np.zeros(0, np.int64), np.zeros(0, np.int64))]) == empty


def test_gaps_of_centuries_are_sorted_too() -> None:
    ns, counts = np.array([5, 2**62, 1]), np.array([3, 1, 2])
    assert describe_weighted([(ns, counts)])["p50"] == 5e-9
