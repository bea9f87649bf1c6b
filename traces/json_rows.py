"""JSON lines (one object a line) to columns."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sim.errors import UserError

from .rows import Columns, column
from .schema import Schema
from .source import BadRows, Source
from .values import BadRow, shown

_DECODER = json.JSONDecoder(parse_float=str)
"""Decimals stay text: the converters read them exactly."""


def objects(first_line: int, block: bytes, bad: BadRows) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, object) of each line that is not blank; others are reported to `bad`."""
    for number, line in enumerate(block.split(b"\n"), start=first_line):
        if not line.strip():
            continue
        text = ""
        try:
            text = line.decode().strip()
            value = _DECODER.decode(text)
            if not isinstance(value, dict):
                raise BadRow("malformed", f"is not a JSON object: {shown(text)}")
        except json.JSONDecodeError as error:
            at_end = error.pos >= len(text) or error.msg.startswith("Unterminated")
            kind, what = ("truncated", "ends early") if at_end else ("malformed", "is not JSON")
            bad.report(f"line {number}", kind, f"{what} ({error.msg}): {_tail(text, at_end)}")
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            bad.report(f"line {number}", "malformed", f"is not JSON ({_cause(error)})")
        except BadRow as error:
            bad.report(f"line {number}", error.kind, error.reason)
        else:
            yield number, value


def first_keys(source: Source) -> list[str]:
    """The keys of the first line that is an object; UserError when none is."""
    bad = BadRows(source.shown, skip=True)
    for first_line, block in source.blocks(bad, quotes=False):
        for _, value in objects(first_line, block, bad):
            return list(value)
    raise UserError(f"{source.shown}: no line of it is a JSON object; {bad.first}")


def _tail(text: str, at_end: bool) -> str:
    return f"... {shown(text[-40:])}" if at_end else shown(text)


def _cause(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number of too many digits"


class JsonReader:
    """Parses blocks of whole lines of one file."""

    def __init__(self, schema: Schema, bad: BadRows) -> None:
        self.schema = schema
        self.bad = bad
        self.converters = [
            (role, schema.columns[role], convert) for role, convert in schema.converters().items()
        ]

    def arrivals_in(self, block: bytes) -> Iterator[object]:
        """Arrival values, as they are, of the rows of a block (to tell dates from seconds)."""
        name = self.schema.columns["arrival"]
        for _, value in objects(1, block, BadRows("", skip=True)):
            yield value.get(name)

    def parse(self, first_line: int, block: bytes) -> Columns:
        """The good rows of `block`, whose lines are numbered from `first_line`; raises UserError
        for the first bad one unless those are skipped."""
        cells: dict[str, list[object]] = {role: [] for role, _, _ in self.converters}
        for number, value in objects(first_line, block, self.bad):
            try:
                row = {role: convert(value.get(name)) for role, name, convert in self.converters}
                self.schema.check_row(row)
            except BadRow as error:
                self.bad.report(f"line {number}", error.kind, error.reason)
            else:
                for role, cell in row.items():
                    cells[role].append(cell)
        return {role: column(role, values) for role, values in cells.items()}
