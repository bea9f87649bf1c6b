"""Parquet to columns. Whole columns of plain numbers at once, anything else cell by cell."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sim.errors import UserError

from .rows import Column, Columns, column, dtype
from .schema import Schema
from .source import BadRows, Source
from .values import MAX_NS, MAX_TOKENS, UNIT_NS, BadRow

BATCH_ROWS = 1 << 17


class ParquetReader:
    """Reads the named columns of one Parquet file in batches.

    Raises UserError when the file or the types of its columns cannot be read.
    """

    def __init__(self, source: Source) -> None:
        import pyarrow.parquet

        self.source = source
        with self._errors():
            place = io.BytesIO(source.content()) if source.gzip else str(source.path)
            self.file = pyarrow.parquet.ParquetFile(place)
            self.names: list[str] = list(self.file.schema_arrow.names)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            reason = lines[0][:200]
            raise UserError(f"{self.source.shown}: is not readable Parquet: {reason}") from None

    def arrivals_in(self, schema: Schema) -> Iterator[object]:
        """Arrival cells of the first batch (to tell dates from seconds)."""
        name = schema.columns["arrival"]
        with self._errors():
            for batch in self.file.iter_batches(1000, columns=[name]):
                yield from _cells(batch.column(batch.schema.get_field_index(name)))[0]
                return

    def parse(self, schema: Schema, bad: BadRows) -> Iterator[Columns]:
        """The good rows in batches; raises UserError for the first bad one unless skipped. Rows
        are numbered from 1."""
        first_row = 1
        batches = self.file.iter_batches(BATCH_ROWS, columns=sorted(set(schema.columns.values())))
        while True:
            with self._errors():
                batch = next(batches, None)
                if batch is None:
                    return
                arrays = {
                    role: batch.column(batch.schema.get_field_index(name))
                    for role, name in schema.columns.items()
                }
                whole = {role: _at_once(role, array, schema) for role, array in arrays.items()}
            if all(values is not None for values in whole.values()):
                yield {role: values for role, values in whole.items() if values is not None}
            else:
                with self._errors():
                    cells = {role: _cells(array) for role, array in arrays.items()}
                yield _one_by_one(schema, bad, cells, first_row)
            first_row += batch.num_rows


def _at_once(role: str, array: Any, schema: Schema) -> Column | None:
    """The column as it is needed, if every cell is a good plain number; else None."""
    import pyarrow.types as types

    if array.null_count:
        return None
    if types.is_timestamp(array.type) and role == "arrival":
        scale = UNIT_NS[array.type.unit]
        stamps: Column = array.cast("int64").to_numpy(zero_copy_only=False)
        if len(stamps) and int(np.abs(stamps).max()) > MAX_NS // scale:
            return None
        scaled: Column = stamps * scale
        return scaled
    if not (types.is_integer(array.type) or types.is_floating(array.type)):
        return None
    numbers: Column = array.to_numpy(zero_copy_only=False)
    if role == "arrival":
        return _times(numbers, schema.unit)
    if role in ("prompt", "output", "priority") and types.is_integer(array.type):
        low = 1 if role != "priority" else -MAX_TOKENS
        if len(numbers) and not (numbers.min() >= low and numbers.max() <= MAX_TOKENS):
            return None
        return numbers.astype(dtype(role))
    return None


def _times(numbers: Column, unit: str) -> Column | None:
    if unit == "date" or (len(numbers) and not numbers.min() >= 0):
        return None
    scale = UNIT_NS[unit]
    if numbers.dtype.kind == "f":
        numbers = numbers.astype(np.float64)
        if not np.isfinite(numbers).all() or (len(numbers) and float(numbers.max()) * scale > 9e18):
            return None
        # the fraction apart: as exact as the file is
        whole = np.floor(numbers)
        part = np.rint((numbers - whole) * scale).astype(np.int64)
        exact: Column = whole.astype(np.int64) * scale + part
        return exact
    if len(numbers) and int(numbers.max()) > MAX_NS // scale:
        return None
    scaled: Column = numbers.astype(np.int64) * scale
    return scaled


def _cells(array: Any) -> tuple[list[Any], str | None]:
    """Cells as Python objects, and the unit of time stamps (their cells are then integers)."""
    import pyarrow.types as types

    if types.is_timestamp(array.type):
        return array.cast("int64").to_pylist(), array.type.unit
    return array.to_pylist(), None


def _one_by_one(
    schema: Schema, bad: BadRows, cells: dict[str, tuple[list[Any], str | None]], first_row: int
) -> Columns:
    converters = schema.converters()
    unit = cells["arrival"][1] if "arrival" in cells else None
    good: dict[str, list[object]] = {role: [] for role in cells}
    roles = list(cells)
    for number, values in enumerate(zip(*(cells[role][0] for role in roles), strict=True)):
        try:
            row: dict[str, object] = {}
            for role, value in zip(roles, values, strict=True):
                if role == "arrival" and unit is not None and value is not None:
                    row[role] = _stamp(value, unit)
                else:
                    row[role] = converters[role](value)
            schema.check_row(row)
        except BadRow as error:
            bad.report(f"row {first_row + number}", error.kind, error.reason)
        else:
            for role, cell in row.items():
                good[role].append(cell)
    return {role: column(role, values) for role, values in good.items()}


def _stamp(value: int, unit: str) -> int:
    result = value * UNIT_NS[unit]
    if abs(result) > MAX_NS:
        raise BadRow("range", "arrival is outside the years 1678 to 2261")
    return result
