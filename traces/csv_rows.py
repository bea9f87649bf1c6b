"""CSV text to columns.

Whole blocks of lines are parsed at once (`bulk`). Lines that it does not take (quotes, exponents,
time zones, anything wrong) are parsed one by one by the converters of the schema, which give the
same cells the same values and say what is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sim.errors import UserError

from . import bulk
from .bulk import Bytes, Ints, Mask
from .rows import Columns, column, dtype, take
from .schema import Converter, Schema
from .source import BOM, BadRows
from .values import MAX_TOKENS, BadRow, shown

NEWLINE, RETURN = b"\n\r"
DELIMITERS = (",", ";", "\t", "|")


@dataclass
class CsvLayout:
    """How the lines of one file are cut, and what its columns are called."""

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
        if block[:1] in b"\r\n" and not block.strip(b"\r\n"):  # a long stretch of blank lines
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
            left = starts if at == 0 else bulk.pick(commas, first + at - 1) + 1
            right = ends if at == width - 1 else bulk.pick(commas, first + at)
            if role == "arrival":
                values, ok = bulk.times(text, left, right, self.schema.unit)
            elif role in ("prompt", "output"):
                values, ok = bulk.digits(text, left, right, 10)
                ok &= (values >= 1) & (values <= MAX_TOKENS)
                values = np.where(ok, values, 0).astype(dtype(role))
            elif role == "priority":
                values, ok = bulk.digits(text, left, right, 9)
            else:
                values, ok = bulk.labels(block, left, right)
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
