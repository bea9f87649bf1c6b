"""Rows in columns on their way from a file to a Trace: which are kept, and in what order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .values import MAX_NS, MIN_NS

Column = npt.NDArray[Any]
Columns = dict[str, Column]
"""role -> equally long columns: int64 arrivals (ns) and priorities, int32 prompt and output
lengths, objects (str, list of hash ids) otherwise."""

_DTYPES: dict[str, npt.DTypeLike] = {
    "arrival": np.int64,
    "prompt": np.int32,
    "output": np.int32,
    "priority": np.int64,
}


def dtype(role: str) -> npt.DTypeLike:
    return _DTYPES.get(role, object)


def column(role: str, cells: Sequence[object]) -> Column:
    """Converted cells as a column."""
    return np.fromiter(cells, dtype=dtype(role), count=len(cells))


def size(columns: Columns) -> int:
    return len(columns["prompt"])


def take(columns: Columns, index: npt.NDArray[Any] | slice) -> Columns:
    return {role: values[index] for role, values in columns.items()}


def _joined(parts: list[Columns]) -> Columns:
    """One table of all `parts`, which are emptied column by column to hold memory down."""
    if len(parts) == 1:
        return parts[0]
    return {role: np.concatenate([part.pop(role) for part in parts]) for role in list(parts[0])}


@dataclass
class Selection:
    """Keeps the rows of a time window, the earliest `limit` of them, sorted stably by arrival.

    Window bounds count from the first arrival of the file: `origin_ns` where that is known before
    reading, otherwise the smallest arrival so far. Reading may stop (`done`) when `limit` rows are
    there or the window has passed, if all rows so far were in order: the rest of a long file in
    order is never read. Without arrivals the order is the file's and there is no window.
    """

    start_ns: int = 0
    end_ns: int | None = None
    limit: int | None = None
    origin_ns: int | None = None
    rows_read: int = 0
    rows_reordered: int = 0
    """Rows that arrive earlier than one before them."""
    first_ns: int = MAX_NS
    last_ns: int = MIN_NS
    missed: bool = False
    """Rows were left out by a window that turned out to begin earlier: read again."""
    kept: int = 0
    parts: list[Columns] = field(default_factory=list)

    @property
    def windowed(self) -> bool:
        return self.start_ns > 0 or self.end_ns is not None

    @property
    def origin(self) -> int:
        return self.first_ns if self.origin_ns is None else self.origin_ns

    @property
    def done(self) -> bool:
        if self.rows_reordered:
            return False
        past = self.end_ns is not None and self.last_ns >= self.origin + self.end_ns
        return past or (self.limit is not None and self.kept >= self.limit)

    def add(self, columns: Columns) -> None:
        """Take over a block of rows, in the file's order."""
        if not size(columns):
            return
        self.rows_read += size(columns)
        if "arrival" in columns:
            arrival = columns["arrival"]
            latest = np.maximum(np.maximum.accumulate(arrival), self.last_ns)
            self.rows_reordered += int(np.count_nonzero(arrival < latest))
            self.last_ns = int(latest[-1])
            first_ns = min(self.first_ns, int(arrival.min()))
            if first_ns < self.first_ns and self.parts and self.start_ns:
                self.missed = self.origin_ns is None
            self.first_ns = first_ns
            columns = self._inside(columns)
        self.kept += size(columns)
        self.parts.append(columns)

    def _inside(self, columns: Columns) -> Columns:
        if not self.windowed:
            return columns
        arrival = columns["arrival"]
        inside = arrival >= min(self.origin + self.start_ns, MAX_NS)
        if self.end_ns is not None and self.origin + self.end_ns <= MAX_NS:
            inside &= arrival < self.origin + self.end_ns
        return columns if inside.all() else take(columns, inside)

    def finish(self) -> tuple[Columns, dict[str, int]]:
        """The rows kept, and what was done to the others. Needs at least one row read."""
        columns = _joined(self.parts)
        counts = {"rows_read": self.rows_read, "rows_reordered": self.rows_reordered}
        if "arrival" in columns:
            columns = self._inside(columns)
            if self.rows_reordered:
                columns = take(columns, np.argsort(columns["arrival"], kind="stable"))
        if self.windowed:
            counts["rows_outside_window"] = self.rows_read - size(columns)
        if self.limit is not None:
            counts["rows_over_limit"] = max(0, size(columns) - self.limit)
            columns = take(columns, slice(self.limit))
        return columns, counts
