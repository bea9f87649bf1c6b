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


def describe_weighted(
    parts: Sequence[tuple[IntArray, IntArray]],
) -> dict[str, float | int | None]:
    """The same for samples in nanoseconds that come as (values, how many of each), in several
    parts, exactly as if all were written out. Neither may be negative."""
    parts = [(ns, counts) for ns, counts in parts if len(ns)]
    if not parts:
        return _empty()
    ns, counts = _sorted(parts)
    last = np.cumsum(counts)  # of equal samples: one past the rank of the last
    total = int(last[-1])
    found = []
    for q in PERCENTILES:
        rank = (total - 1) * (q / 100)
        low = int(rank)
        a, b = (int(ns[np.searchsorted(last, r, side="right")]) for r in (low, _next(low, total)))
        found.append((a + (b - a) * (rank - low)) / NS)
    mean = sum(float(np.dot(v.astype(np.float64), k)) for v, k in parts) / total
    return _named(total, mean / NS, found, float(ns[-1]) / NS)


def _sorted(parts: Sequence[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    """All parts together, sorted by value. Value and count share a word where they fit, because
    sorting words in place takes a third of the memory of sorting indices."""
    bits = max(int(counts.max()) for _, counts in parts).bit_length()
    if max(int(ns.max()) for ns, _ in parts).bit_length() + bits > 62:
        ns = np.concatenate([ns for ns, _ in parts])
        order = np.argsort(ns, kind="stable")
        return ns[order], np.concatenate([counts for _, counts in parts])[order]
    words = np.concatenate([(ns << bits) | counts for ns, counts in parts])
    words.sort()
    counts = words & ((1 << bits) - 1)
    words >>= bits
    return words, counts


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
