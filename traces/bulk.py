"""Many cells of text at once, with numpy: each exactly or not at all.

A column of cells is given as the text's bytes and, for each cell, where it begins (`left`) and ends
(`right`, not included). The result is the values, and which cells were understood; the others hold
nonsense. What is understood has the value that the converters of `values` give it.
"""

from __future__ import annotations

import datetime

import numpy as np
import numpy.typing as npt

from .rows import Column
from .values import TIME_DIGITS

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

DOT, COLON, DASH, PLUS, ZERO = b".:-+0"


def pick(positions: Ints, index: Ints) -> Ints:
    if not len(positions):
        return np.zeros(len(index), dtype=np.int64)
    return positions[np.minimum(index, len(positions) - 1)]


def digits(text: Bytes, left: Ints, right: Ints, most: int) -> tuple[Ints, Mask]:
    """Cells [left, right) of plain digits as integers, and which cells are 1 to `most` digits."""
    width = right - left
    ok = (width >= 1) & (width <= most)
    values = np.zeros(len(left), dtype=np.int64)
    longest = int(width[ok].max()) if ok.any() else 0
    for place in range(longest):
        digit = text[np.minimum(left + place, len(text) - 1)] - np.uint8(ZERO)  # wraps when not
        inside = place < width
        ok &= (digit <= 9) | ~inside
        values = np.where(inside, values * 10 + digit, values)
    return values, ok


def _decimals(text: Bytes, left: Ints, right: Ints, places: int) -> tuple[Ints, Mask]:
    """Cells such as `12.5` times 10**places, with at most `places` digits after the point, as far
    as they fit in 63 bits."""
    dots = np.flatnonzero(text == DOT)
    dot = np.minimum(pick(dots, np.searchsorted(dots, left)) if len(dots) else right, right)
    dot = np.where(dot < left, right, dot)
    whole, ok = digits(text, left, dot, 19 - places)  # below 10**19: too much turns up negative
    values = whole * 10**places
    pointed = dot < right
    if pointed.any():
        part, part_ok = digits(text, dot + 1, right, places)
        scale = 10 ** np.clip(places - (right - dot - 1), 0, places)
        values = np.where(pointed, values + part * scale, values)
        ok &= part_ok | ~pointed
    return values, ok & (values >= 0)


def times(text: Bytes, left: Ints, right: Ints, unit: str) -> tuple[Ints, Mask]:
    if unit != "date":
        return _decimals(text, left, right, TIME_DIGITS[unit])
    return _dates(text, left, right)


def _dates(text: Bytes, left: Ints, right: Ints) -> tuple[Ints, Mask]:
    """Cells such as `2023-11-16 18:15:46.6805900`, with up to 9 decimals or none, with `+00:00`,
    `Z` or no zone."""
    limit = len(text) - 1

    def char(at: Ints) -> Bytes:
        return text[np.clip(at, 0, limit)]

    zulu = char(right - 1) == ord("Z")
    offset = (char(right - 6) == PLUS) & (char(right - 3) == COLON)
    if offset.any():
        for back in (5, 4, 2, 1):
            offset &= char(right - back) == ZERO
    right = right - np.where(zulu, 1, np.where(offset, 6, 0))

    ok = (right - left == 19) | ((right - left >= 21) & (char(left + 19) == DOT))
    separator = char(left + 10)
    ok &= (separator == ord(" ")) | (separator == ord("T"))
    for at, mark in ((4, DASH), (7, DASH), (13, COLON), (16, COLON)):
        ok &= char(left + at) == mark
    fields = []
    for at, width in ((0, 4), (5, 2), (8, 2), (11, 2), (14, 2), (17, 2)):
        value, numeric = digits(text, left + at, left + at + width, width)
        ok &= numeric
        fields.append(value)
    year, month, day, hour, minute, second = fields
    ok &= (hour < 24) & (minute < 60) & (second < 60) & (year >= 1678) & (year <= 2261)
    days, real = _days(year, month, day)
    ok &= real
    seconds = days * 86_400 + hour * 3600 + minute * 60 + second
    places = right - left - 20
    values = np.where(ok, seconds, 0) * 10**9
    if (places > 0).any():
        part, numeric = digits(text, left + 20, right, 9)
        values += np.where(places > 0, part * 10 ** np.clip(9 - places, 0, 9), 0)
        ok &= numeric | (places <= 0)
    return values, ok


def _days(year: Ints, month: Ints, day: Ints) -> tuple[Ints, Mask]:
    """Days since 1970 of each date, and whether there is such a day. Dates change seldom."""
    dates = (year * 100 + month) * 100 + day
    changes = np.concatenate(([True], dates[1:] != dates[:-1]))
    keys, place = np.unique(dates[changes], return_inverse=True)
    place = place[np.cumsum(changes) - 1]
    epoch = datetime.date(1970, 1, 1).toordinal()
    days = np.zeros(len(keys), dtype=np.int64)
    real = np.zeros(len(keys), dtype=np.bool_)
    for i, key in enumerate(keys.tolist()):
        try:
            days[i] = datetime.date(key // 10_000, key // 100 % 100, key % 100).toordinal() - epoch
            real[i] = True
        except (ValueError, OverflowError):
            continue
    return days[place], real[place]


def labels(block: bytes, left: Ints, right: Ints) -> tuple[Column, Mask]:
    cells: list[str] = []
    ok = np.ones(len(left), dtype=np.bool_)
    for i, (a, b) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
        try:
            cells.append(block[a:b].decode())
        except UnicodeDecodeError:
            cells.append("")
            ok[i] = False
        ok[i] &= b - a <= 1000
    return np.fromiter(cells, dtype=object, count=len(cells)), ok
