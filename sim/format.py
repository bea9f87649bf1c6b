"""Numbers for people: three significant digits, never an exponent, `-` for what is not known."""

from __future__ import annotations

import math
from typing import TypeGuard


def duration(seconds: float | None) -> str:
    """In the unit that reads best, from nanoseconds to days."""
    if not _known(seconds):
        return "-"
    if seconds == 0:
        return "0 s"
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit * 0.9995:
            return f"{_three(seconds * scale)} {unit}"
    if seconds < 600:
        return f"{_three(seconds)} s"
    if seconds < 36_000:
        return f"{_three(seconds / 60)} min"
    if seconds < 864_000:
        return f"{_three(seconds / 3600)} h"
    return f"{_three(seconds / 86_400)} d"


def rate(value: float | None) -> str:
    """Something per second, or an average of counts."""
    return _three(value) if _known(value) else "-"


def percent(part: float | None) -> str:
    """One decimal; what is almost nothing or almost all is not rounded to nothing or all."""
    if not _known(part):
        return "-"
    shown = f"{part * 100:,.1f}"
    if shown == "0.0" and part > 0:
        shown = "<0.1"
    if shown == "100.0" and part < 1:
        shown = ">99.9"
    return f"{shown} %"


def count(value: float | None) -> str:
    """A whole number; an average of some has a decimal."""
    if not _known(value):
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _three(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995 or size == 0:
        return f"{value:.2f}"
    return f"{value:.{2 - math.floor(math.log10(size))}f}"


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
