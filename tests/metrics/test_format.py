"""Numbers as a person reads them, at the extremes too."""

from __future__ import annotations

import math

import pytest

from sim.format import count, duration, percent, rate


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.00"), (0.00123, "0.00123"), (1.2e-7, "0.000000120"), (0.99951, "1.00"),
        (6.6, "6.60"), (9.996, "10.0"), (99.96, "100"), (3540.0, "3,540"),
        (1.5e12, "1,500,000,000,000"), (-0.0015, "-0.00150"), (-12.34, "-12.3"),
    ],
)  # fmt: skip
def test_rates_have_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert rate(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0 s"), (4e-10, "0.400 ns"), (999.6e-9, "1.00 µs"), (0.0305, "30.5 ms"),
        (0.99951, "1.00 s"), (599.0, "599 s"), (660.0, "11.0 min"), (40_000.0, "11.1 h"),
        (9.2e9, "106,481 d"),
    ],
)  # fmt: skip
def test_durations_have_the_unit_that_reads_best(value: float, shown: str) -> None:
    assert duration(value) == shown
    assert len(shown) < 10  # the columns of the latency table


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0 %"), (0.0001, "<0.1 %"), (0.9999, ">99.9 %"), (1.0, "100.0 %"),
        (0.984, "98.4 %"), (123.4, "12,340.0 %"),
    ],
)  # fmt: skip
def test_percentages_do_not_round_to_nothing_or_all(value: float, shown: str) -> None:
    assert percent(value) == shown


def test_counts_and_their_averages() -> None:
    assert [count(v) for v in (0, 19366, 0.4, 1998.25)] == ["0", "19,366", "0.4", "1,998.2"]


@pytest.mark.parametrize("show", [rate, duration, percent, count])
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash(show: object, value: float | None) -> None:
    assert callable(show)
    assert show(value) == "-"
