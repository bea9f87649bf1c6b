"""CSV text to columns.

Whole blocks of lines are parsed at once with numpy, every cell either exactly or not at all; the
lines it does not take (quotes, exponents, time zones, anything wrong) are parsed one by one by the
converters of the schema, which accept the same cells with the same values and say what is wrong.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.errors import UserError

from .rows import Column, Columns, column, dtype, take
from .schema import Converter, Schema
from .source import BOM, BadRows
from .values import MAX_TOKENS, TIME_DIGITS, BadRow, shown

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NEWLINE, RETURN, QUOTE, DOT, COLON, DASH, PLUS, ZERO = b'\n\r".:-+0'
DELIMITERS = (",", ";", "\t", "|")


@dataclass
class CsvLayout:
    """How the lines of one file are cut: the delimiter, the names of the columns, and the schema's
    roles by their position among them."""

    delimiter: str
    names: list[str]
    header_line: int
    """Number of the line (from 1) that the header ends on."""


def read_layout(path: str, head: bytes) -> CsvLayout:
    """The layout told by the header, the first line that is not blank; raises UserError."""
    lines = enumerate(head.removeprefix(BOM).split(b"\n"), start=1)
    number, line = next((i, line) for i, line in lines if line.strip())
    text = line.decode(errors="replace").removesuffix("\r")
    delimiter = max(DELIMITERS, key=text.count)
    names = split_row(text, delimiter)
    if names is None:
        raise UserError(f"{path}: line {number}: a quote in the header is not closed")
    names = [name.strip() for name in names]
    if all(_is_number(name) for name in names):
        raise UserError(f"{path}: line {number}: has no header naming the columns, only numbers")
    return CsvLayout(delimiter, names, number)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def split_row(text: str, delimiter: str) -> list[str] | None:
    """The cells of one row; None when a quote is not closed or stands inside a plain cell."""
    if '"' not in text:
        return text.split(delimiter)
    cells = []
    at = 0
    while True:
        if text.startswith('"', at):
            cell = ""
            while True:
                end = text.find('"', at + 1)
                if end < 0:
                    return None
                cell += text[at + 1 : end]
                at = end + 1
                if not text.startswith('"', at):
                    break
                cell += '"'
            if at < len(text) and text[at] != delimiter:
                return None
        else:
            end = text.find(delimiter, at)
            end = len(text) if end < 0 else end
            cell, at = text[at:end], end
            if '"' in cell:
                return None
        cells.append(cell)
        if at >= len(text):
            return cells
        at += 1


class CsvReader:
    """Parses blocks of whole lines of one file."""

    def __init__(self, layout: CsvLayout, schema: Schema, bad: BadRows) -> None:
        self.layout = layout
        self.schema = schema
        self.bad = bad
        self.at = {role: layout.names.index(name) for role, name in schema.columns.items()}
        self.converters: dict[str, Converter] = schema.converters()

    def arrivals_in(self, block: bytes) -> Iterator[str]:
        """Arrival cells, as they are, of the rows of a block (to tell dates from seconds)."""
        for line in block.split(b"\n"):
            cells = split_row(line.decode(errors="replace").strip("\r"), self.layout.delimiter)
            if cells is not None and len(cells) == len(self.layout.names):
                yield cells[self.at["arrival"]]

    def parse(self, first_line: int, block: bytes) -> Columns:
        """The good rows of `block`, whose lines are numbered from `first_line`; raises UserError
        for the first bad one unless those are skipped."""
        if b'"' in block or (b"\r" in block and block.count(b"\r") != block.count(b"\r\n")):
            return self._one_by_one(first_line, block)
        if not block:
            return {role: column(role, []) for role in self.at}
        text = np.frombuffer(block, dtype=np.uint8)
        ends = np.flatnonzero(text == NEWLINE)
        starts = np.concatenate(([0], ends[:-1] + 1))
        numbers = np.arange(first_line, first_line + len(ends))
        ends = ends - (text[np.maximum(ends - 1, 0)] == RETURN) * (ends > starts)
        filled = ends > starts
        if not filled.all():
            starts, ends, numbers = starts[filled], ends[filled], numbers[filled]
        columns, good = self._at_once(block, text, starts, ends)
        for i in np.flatnonzero(~good):
            cells = self._row(int(numbers[i]), block[starts[i] : ends[i]])
            if cells is not None:
                good[i] = True
                for role, value in cells.items():
                    columns[role][i] = value
        return columns if good.all() else take(columns, good)

    def _at_once(self, block: bytes, text: Bytes, starts: Ints, ends: Ints) -> tuple[Columns, Mask]:
        """All rows in columns, and which of them are right; the others hold nonsense."""
        width = len(self.layout.names)
        commas = np.flatnonzero(text == ord(self.layout.delimiter))
        first = np.searchsorted(commas, starts)
        good = np.searchsorted(commas, ends) - first == width - 1
        columns: Columns = {}
        for role, at in self.at.items():
            # rows of another width read any cell: bounded, and not used
            left = starts if at == 0 else _pick(commas, first + at - 1) + 1
            right = ends if at == width - 1 else _pick(commas, first + at)
            if role == "arrival":
                values, ok = _times(text, left, right, self.schema.unit)
            elif role in ("prompt", "output"):
                values, ok = digits(text, left, right, 10)
                ok &= (values >= 1) & (values <= MAX_TOKENS)
                values = np.where(ok, values, 0).astype(dtype(role))
            elif role == "priority":
                values, ok = digits(text, left, right, 9)
            else:
                values, ok = _labels(block, left, right)
            columns[role] = values
            good &= ok
        return columns, good

    def _one_by_one(self, first_line: int, block: bytes) -> Columns:
        """Rows with quotes, which may run over several lines."""
        parsed: list[dict[str, object]] = []
        lines = block.split(b"\n")
        i = 0
        while i < len(lines):
            begin = i
            row = lines[i]
            i += 1
            if row.count(b'"') % 2:
                rest = itertools.count(i)
                close = next((j for j in rest if j >= len(lines) or lines[j].count(b'"') % 2), 0)
                if close < len(lines):
                    row = b"\n".join(lines[begin : close + 1])
                    i = close + 1
            row = row.removesuffix(b"\r")
            if row:
                cells = self._row(first_line + begin, row)
                if cells is not None:
                    parsed.append(cells)
        return {role: column(role, [row[role] for row in parsed]) for role in self.at}

    def _row(self, line: int, raw: bytes) -> dict[str, object] | None:
        """The values of one row, or None when it was bad and skipped."""
        text = raw.decode(errors="surrogateescape")
        try:
            cells = split_row(text, self.layout.delimiter)
            if cells is None:
                raise BadRow("malformed", f"a quote is not closed or misplaced in {shown(text)}")
            if len(cells) != len(self.layout.names):
                expected = f"expected {len(self.layout.names)} cells, found {len(cells)}"
                raise BadRow("malformed", f"{expected}: {shown(text)}")
            row = {role: self.converters[role](cells[at]) for role, at in self.at.items()}
        except BadRow as bad:
            self.bad.report(f"line {line}", bad.kind, bad.reason)
            return None
        return row


def _pick(positions: Ints, index: Ints) -> Ints:
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
    dot = np.minimum(_pick(dots, np.searchsorted(dots, left)) if len(dots) else right, right)
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


def _times(text: Bytes, left: Ints, right: Ints, unit: str) -> tuple[Ints, Mask]:
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


def _labels(block: bytes, left: Ints, right: Ints) -> tuple[Column, Mask]:
    cells: list[Any] = []
    ok = np.ones(len(left), dtype=np.bool_)
    for i, (a, b) in enumerate(zip(left.tolist(), right.tolist(), strict=True)):
        try:
            cells.append(block[a:b].decode())
        except UnicodeDecodeError:
            cells.append("")
            ok[i] = False
        ok[i] &= b - a <= 1000
    return np.fromiter(cells, dtype=object, count=len(cells)), ok
