"""When requests arrive: processes that a trace without arrivals, or a generated one, follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sim.errors import UserError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_REQUESTS = 200_000_000
MAX_SECONDS = 4e9
"""Arrivals later than this (126 years) do not fit the nanosecond clock."""


class ArrivalProcess(Protocol):
    """Arrivals in nanoseconds from the trace's start, ascending.

    The first `k` of `first(n, rng)` do not depend on `n`, and a change of rate stretches the same
    pattern: runs that differ only there see the same random numbers.
    """

    def first(self, n: int, rng: np.random.Generator) -> Ints:
        """The first `n` arrivals."""

    def within(self, duration_s: float, rng: np.random.Generator) -> Ints:
        """All arrivals before `duration_s`."""


@dataclass(frozen=True)
class Constant:
    """One request every `1/rate` seconds, the first at 0. `rate` in requests/s."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def first(self, n: int, rng: np.random.Generator) -> Ints:
        return _to_ns(np.arange(n) / self.rate)

    def within(self, duration_s: float, rng: np.random.Generator) -> Ints:
        _check_count(duration_s * self.rate)
        return self.first(max(0, math.ceil(duration_s * self.rate)), rng)


@dataclass(frozen=True)
class Poisson:
    """Independent exponential gaps. `rate` in requests/s."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def first(self, n: int, rng: np.random.Generator) -> Ints:
        return _to_ns(np.cumsum(rng.standard_exponential(n)) / self.rate)

    def within(self, duration_s: float, rng: np.random.Generator) -> Ints:
        return _within(duration_s, self.rate, 1.0, rng.standard_exponential)


@dataclass(frozen=True)
class Gamma:
    """Independent gamma gaps with coefficient of variation `cv`: 1 is Poisson, more is bursty.

    `rate` in requests/s. Two parameters as in BurstGPT and AlpaServe (shape = 1/cv^2).
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if not 0.01 <= self.cv <= 100:
            raise UserError(f"gamma arrivals: cv must be between 0.01 and 100, not {self.cv:g}")

    def _gaps(self, n: int, rng: np.random.Generator) -> Floats:
        """`n` gaps of mean 1."""
        shape = 1 / self.cv**2
        return rng.standard_gamma(shape, n) / shape

    def first(self, n: int, rng: np.random.Generator) -> Ints:
        return _to_ns(np.cumsum(self._gaps(n, rng)) / self.rate)

    def within(self, duration_s: float, rng: np.random.Generator) -> Ints:
        return _within(duration_s, self.rate, self.cv, lambda n: self._gaps(n, rng))


PROCESSES: dict[str, Callable[..., ArrivalProcess]] = {
    "constant": Constant,
    "gamma": Gamma,
    "poisson": Poisson,
}


def _within(duration_s: float, rate: float, cv: float, gaps: Callable[[int], Floats]) -> Ints:
    """Arrivals of a renewal process before `duration_s`, from `gaps(n)` of mean 1."""
    _check_count(duration_s * rate)
    expected = duration_s * rate
    n = int(expected + 4 * cv * math.sqrt(expected)) + 16
    parts = [np.cumsum(gaps(n))]
    while parts[-1][-1] < expected:
        parts.append(parts[-1][-1] + np.cumsum(gaps(n)))
        _check_count(n * len(parts))
    arrivals = np.concatenate(parts)
    return _to_ns(arrivals[: np.searchsorted(arrivals, expected)] / rate)


def _to_ns(seconds: Floats) -> Ints:
    if len(seconds) and not seconds[-1] <= MAX_SECONDS:
        raise UserError(f"arrivals would last {seconds[-1]:.3g} s, more than the clock holds")
    return np.rint(seconds * 1e9).astype(np.int64)


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1e9:
        raise UserError(
            f"arrivals: rate must be above 0 and at most 1e9 (requests per second), not {rate:g}"
        )


def _check_count(expected: float) -> None:
    if not expected <= MAX_REQUESTS:
        raise UserError(f"arrivals: about {expected:.3g} requests, more than {MAX_REQUESTS}")
