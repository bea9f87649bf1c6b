"""Measured points in the column layout of published kernel timings, from CSV files.

One row is one shape on one GPU; times are microseconds. The operator is recognised by the columns,
whatever the file is called, and one file holds one operator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from sim.cost.operators import FORMS
from sim.cost.operators.base import Array
from sim.errors import UserError, normalise

TIME_COLUMNS = ("us", "time_us")

RECOGNISED_BY: Mapping[str, frozenset[str]] = {
    "gemm": frozenset({"m", "n", "k"}),
    "prefill": frozenset({"q_len", "heads", "kv_heads", "head_dim"}),
    "decode": frozenset({"batch", "kv_len", "heads", "kv_heads", "head_dim"}),
    "mixed": frozenset({"prefill_chunk", "kv_prefill", "n_decode", "kv_decode"}),
    "moe": frozenset({"tokens", "hidden", "inter", "topk", "experts"}),
    "collective": frozenset({"op", "bytes", "world"}),
    "elementwise": frozenset({"op", "tokens", "dim"}),
}
"""Columns that only points of that operator have."""

DEFAULTS: Mapping[str, float] = {"batch": 1, "prefix": 0, "tp": 1, "ep": 1, "head_dim": 128}
"""Sizes a file may leave out."""

LAYER_KERNELS = re.compile(r"_proj$|^lm_head$")
"""Kernel columns that name the place in the model, not the kernel: one operator all the same."""


@dataclass(frozen=True)
class Points:
    """The rows of one file; the index of `table` is the row number in the file."""

    source: str
    op: str
    table: pd.DataFrame

    def sizes(self, rows: pd.DataFrame | None = None) -> dict[str, Array]:
        """The operator's sizes as float arrays, what is missing filled in."""
        table = self.table if rows is None else rows
        found: dict[str, Array] = {}
        for name in FORMS[self.op].sizes:
            if name in table:
                column = table[name].to_numpy(dtype=np.float64)
                found[name] = np.nan_to_num(column, nan=DEFAULTS.get(name, np.nan))
            elif name in DEFAULTS:
                found[name] = np.full(len(table), float(DEFAULTS[name]))
            else:
                raise UserError(f"{self.source}: no column {name!r}, which {self.op} points need")
        return found

    def keys(self) -> pd.DataFrame:
        """The key columns that are there, as text (world sizes as numbers), one row per point."""
        table = self.table
        keys = pd.DataFrame(index=table.index)
        for name in FORMS[self.op].keys:
            if name in table:
                column = table[name]
                keys[name] = column if name == "world" else column.fillna("").astype(str)
        if "kernel" in keys:
            layer = keys["kernel"].str.contains(LAYER_KERNELS)
            keys["kernel"] = keys["kernel"].mask(layer, "linear")
        if self.op == "collective" and "gpu" in table:
            # Topologies that are not the GPU's usual node are another operator.
            odd = table["gpu"].astype(str).str.contains("pairwise")
            if odd.any():
                keys["node"] = table["gpu"].where(odd, "")
        return keys

    @property
    def us(self) -> Array | None:
        """Measured microseconds; None when the file has none."""
        name = next((c for c in TIME_COLUMNS if c in self.table), None)
        return None if name is None else self.table[name].to_numpy(dtype=np.float64)


def read_points(path: Path) -> Points:
    """The points of a CSV file, plain or gzip. Raises UserError naming file, row and column."""
    try:
        table = pd.read_csv(path, low_memory=False)
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror})") from error
    except (ValueError, EOFError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path}: not a CSV of measured points ({first})") from error
    return check_points(table, str(path))


def check_points(table: pd.DataFrame, source: str) -> Points:
    columns = set(table.columns)
    op = next((name for name, need in RECOGNISED_BY.items() if need <= columns), None)
    if op is None:
        known = "; ".join(f"{n}: {', '.join(sorted(c))}" for n, c in RECOGNISED_BY.items())
        raise UserError(f"{source}: its columns belong to no known operator ({known})")
    sizes = FORMS[op].sizes if op in FORMS else tuple(sorted(RECOGNISED_BY[op]))
    for name in (*sizes, *(c for c in TIME_COLUMNS if c in columns)):
        if name not in columns:
            continue
        numbers = pd.to_numeric(table[name], errors="coerce")
        bad = table[name].notna() & (numbers.isna() | (numbers < 0))
        if name in TIME_COLUMNS:
            bad |= table[name].isna() | (numbers <= 0)
        if bad.any():
            row = int(np.flatnonzero(bad.to_numpy())[0])
            raise UserError(
                f"{source}: row {row + 2}: {name} is {table[name].iloc[row]}, not a "
                f"{'positive' if name in TIME_COLUMNS else 'non-negative'} number"
            )
        table[name] = numbers
    return Points(source, op, table)


def of_gpu(points: Points, names: Sequence[str]) -> Points:
    """The points whose `gpu` is one of the names (in any spelling); all, without such a column."""
    if "gpu" not in points.table:
        return points
    wanted = {normalise(n) for n in names}
    spelled = points.table["gpu"].astype(str)
    mine = spelled.map({s: normalise(s) in wanted for s in spelled.unique()}).astype(bool)
    return Points(points.source, points.op, points.table[mine])
