"""The named columns of any table: CSV, JSON lines or Parquet; plain or gzip, told by the content.

`--columns ROLE=COLUMN,...` names them, as for traces. Cells come as text, numbers or None, each
with the place it is from.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sim.errors import UserError, unknown
from traces.csv_rows import read_layout
from traces.json_rows import first_keys, objects
from traces.parquet_rows import ParquetReader
from traces.schema import role_pairs, spelt
from traces.source import BadRows, Source
from traces.values import TIME_DIGITS

UNITS = tuple(TIME_DIGITS)


def parse_roles(text: str, known: Sequence[str], times: Sequence[str]) -> dict[str, str]:
    """`arrival=ts,prompt=in_tok` -> {role: column}. Roles of `times` may carry a unit (`ttft_ms`);
    without one they are seconds. UserError for an unknown role, one named twice, or a column whose
    name says another unit than its role."""
    roles: dict[str, str] = {}
    every = [*known, *(f"{time}_{unit}" for time in times for unit in UNITS)]
    for role, column in role_pairs(text):
        if role not in every:
            raise unknown("column role", role, every)
        if base_of(role, times) in {base_of(other, times) for other in roles}:
            raise UserError(f"columns: {base_of(role, times)} is named twice")
        unit = column.rpartition("_")[2].lower()
        if role in times and unit in UNITS and unit != "s":
            raise UserError(
                f"columns: {role}={column} would be seconds, but the column's name says {unit}; "
                f"write {role}_{unit}={column} (or {role}_s={column} for seconds)"
            )
        roles[role] = column
    return roles


def base_of(role: str, times: Sequence[str]) -> str:
    """The role without its unit."""
    head, _, unit = role.rpartition("_")
    return head if unit in UNITS and head in times else role


def unit_of(role: str, times: Sequence[str]) -> str:
    return role.rpartition("_")[2] if base_of(role, times) != role else "s"


@dataclass(frozen=True)
class Row:
    """One row: its cells by role, and where it stands (`line 7`, `row 7`)."""

    place: str
    cells: Mapping[str, object]


@dataclass
class Table:
    """An open file of which some columns have roles."""

    source: Source
    names: Sequence[str]
    """All columns it has."""
    kind: str
    """csv, json lines or parquet."""

    @property
    def shown(self) -> str:
        return self.source.shown

    def rows(self, roles: Mapping[str, str], bad: BadRows) -> Iterator[Row]:
        """The rows with the cells of the roles' columns, whose names may differ in case and
        punctuation; broken rows are reported to `bad`."""
        columns = spelt(self.shown, self.names, roles)
        reader = {"csv": self._csv, "json lines": self._json, "parquet": self._parquet}
        return reader[self.kind](columns, bad)

    def _csv(self, columns: Mapping[str, str], bad: BadRows) -> Iterator[Row]:
        layout = read_layout(self.shown, self.source.head)
        at = {role: layout.names.index(name) for role, name in columns.items()}
        for first_line, block in self.source.blocks(bad, quotes=True):
            text = block.decode("utf-8", errors="replace")
            reader = csv.reader(io.StringIO(text), delimiter=layout.delimiter)
            line = first_line
            while True:
                try:
                    cells = next(reader, None)
                except csv.Error as error:
                    bad.report(f"line {line}", "malformed", f"is not CSV ({error})")
                    continue
                if cells is None:
                    break
                begin, line = line, first_line + reader.line_num
                if not cells or begin <= layout.header_line:
                    continue
                if len(cells) != len(layout.names):
                    wanted = f"expected {len(layout.names)} cells, found {len(cells)}"
                    bad.report(f"line {begin}", "malformed", wanted)
                    continue
                yield Row(f"line {begin}", {role: cells[i] for role, i in at.items()})

    def _json(self, columns: Mapping[str, str], bad: BadRows) -> Iterator[Row]:
        for first_line, block in self.source.blocks(bad, quotes=False):
            for line, value in objects(first_line, block, bad):
                cells = {role: value.get(name) for role, name in columns.items()}
                yield Row(f"line {line}", cells)

    def _parquet(self, columns: Mapping[str, str], _: BadRows) -> Iterator[Row]:
        names = sorted(set(columns.values()))  # two roles may name one column
        number = 1
        for batch in ParquetReader(self.source).file.iter_batches(1 << 14, columns=names):
            lists = {name: _plain(batch.column(name)) for name in names}
            for i in range(batch.num_rows):
                cells = {role: lists[name][i] for role, name in columns.items()}
                yield Row(f"row {number}", cells)
                number += 1


def open_table(path: str) -> Table:
    """UserError when the file is none, or empty."""
    source = Source(path)
    if source.parquet:
        return Table(source, ParquetReader(source).names, "parquet")
    if source.json:
        return Table(source, first_keys(source), "json lines")
    return Table(source, read_layout(source.shown, source.head).names, "csv")


def _plain(array: Any) -> list[object]:
    """Cells as Python objects; time stamps as ISO text."""
    import pyarrow.types as types

    if types.is_timestamp(array.type):
        return [None if cell is None else cell.isoformat(sep=" ") for cell in array.to_pylist()]
    found: list[object] = array.to_pylist()
    return found
