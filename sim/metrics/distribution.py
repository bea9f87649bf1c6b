"""Mean and percentiles of samples, also of samples that come with a count each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)
NS = 1e9
"""Nanoseconds in a second; dividing by it is exact to the last bit, multiplying by 1e-9 is not."""


def describe(values_s: FloatArray) -> dict[str, float | int | None]:
    """`count`, `mean`, `p50` ..., `max` of values in seconds; None where there are no values.

    Percentiles interpolate linearly between order statistics, as numpy does by default.
    """
    if not len(values_s):
        return _empty()
    found = np.percentile(values_s, PERCENTILES)
    return _named(len(values_s), float(values_s.mean()), found, float(values_s.max()))


def describe_weighted(ns: IntArray, counts: IntArray) -> dict[str, float | int | None]:
    """The same for `counts[i]` samples of `ns[i]` nanoseconds each, exactly as if written out."""
    if not len(ns):
        return _empty()
    order = np.argsort(ns, kind="stable")
    ns, counts = ns[order], counts[order]
    last = np.cumsum(counts)  # of equal samples: one past the rank of the last
    total = int(last[-1])
    found = []
    for q in PERCENTILES:
        rank = (total - 1) * (q / 100)
        low = int(rank)
        a, b = (int(ns[np.searchsorted(last, r, side="right")]) for r in (low, _next(low, total)))
        found.append((a + (b - a) * (rank - low)) / NS)
    mean = float(np.dot(ns.astype(np.float64), counts) / total)
    return _named(total, mean / NS, found, float(ns[-1]) / NS)


def _next(rank: int, total: int) -> int:
    return min(rank + 1, total - 1)


def _named(
    count: int, mean: float, found: Sequence[float] | FloatArray, most: float
) -> dict[str, float | int | None]:
    named: dict[str, float | int | None] = {"count": count, "mean": mean}
    named.update({f"p{q}": float(v) for q, v in zip(PERCENTILES, found, strict=True)})
    named["max"] = most
    return named


def _empty() -> dict[str, float | int | None]:
    return {"count": 0, "mean": None, **{f"p{q}": None for q in PERCENTILES}, "max": None}
