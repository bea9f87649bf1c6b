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
    "moe": frozenset({"tokens", "hidden", "inter", "topk", "experts"}),
    "collective": frozenset({"op", "bytes", "world"}),
    "elementwise": frozenset({"op", "tokens", "dim"}),
}
"""Columns that only points of that operator have."""

OTHER_NAMES: Mapping[frozenset[str], Mapping[str, str]] = {
    frozenset({"op", "m", "k", "quant"}): {"m": "tokens", "k": "dim", "quant": "model"},
}
"""Tables of an operator under other names: helpers of dynamic quantisation are elementwise."""

NOT_FITTED: Mapping[str, tuple[frozenset[str], str]] = {
    "attention calls with a prefill chunk among decodes": (
        frozenset({"prefill_chunk", "kv_prefill", "n_decode", "kv_decode"}),
        "a step derives them from prefill and decode points: give those",
    ),
    "decode attention over unequal lengths": (
        frozenset({"kv_mean", "t_mean_us", "t_max_us", "t_skew_us"}),
        "a step derives them from decode points: give those",
    ),
    "DeepEP dispatch and combine": (
        frozenset({"num_token", "num_experts", "dispatch_avg_t_us", "combine_avg_t_us"}),
        "exchanges between experts are priced as collectives: give op, bytes, world and us with "
        "op alltoall",
    ),
    "TensorRT-LLM all-to-all": (
        frozenset({"op_name", "num_tokens", "moe_ep_size", "us"}),
        "exchanges between experts are priced as collectives: give op, bytes, world and us with "
        "op alltoall",
    ),
    "experts by how many are activated": (
        frozenset({"tokens", "activated_experts"}),
        "their sizes are not in the table: give tokens, hidden, inter, topk, experts",
    ),
    "whole deployments": (
        frozenset({"isl", "osl", "silicon_ttft_ms"}),
        "a profile holds single calls: compare these with validate deployments",
    ),
}
"""Published tables that are no points of a fitted operator: their columns, and what to do."""

MAY_BE_ZERO = ("prefix",)

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


def read_points(path: Path, *, timed: bool = True) -> Points:
    """The points of a CSV file, plain or gzip; `timed` False ignores what is in its time columns.
    Raises UserError naming file, row and column."""
    table = read_table(path)
    if not timed:
        table = table.drop(columns=list(TIME_COLUMNS), errors="ignore")
    return check_points(table, str(path))


def read_table(path: Path) -> pd.DataFrame:
    """The file as it is, columns of any kind. Raises UserError when it is no CSV."""
    try:
        return pd.read_csv(path, low_memory=False)
    except OSError as error:
        raise UserError(f"{path}: cannot read ({error.strerror})") from error
    except (ValueError, EOFError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path}: not a CSV of measured points ({first})") from error


class NotFittedError(UserError):
    """A table that is known, but holds no points of an operator that is fitted."""


def check_points(table: pd.DataFrame, source: str) -> Points:
    """The table as points of the operator that its columns belong to; sizes and times become
    numbers. Raises UserError naming row and column, or `NotFittedError`."""
    columns = set(table.columns)
    op = next((name for name, need in RECOGNISED_BY.items() if need <= columns), None)
    if op is None:
        for need, names in OTHER_NAMES.items():
            if need <= columns:
                return check_points(table.rename(columns=names), source)
        for what, (need, advice) in NOT_FITTED.items():
            if need <= columns:
                raise NotFittedError(f"{source}: {what} are not fitted; {advice}")
        known = "; ".join(f"{n}: {', '.join(sorted(c))}" for n, c in RECOGNISED_BY.items())
        raise UserError(f"{source}: its columns belong to no known operator ({known})")
    checked = {
        name: _numbers(table[name], name, source)
        for name in (*FORMS[op].sizes, *TIME_COLUMNS)
        if name in columns
    }
    return Points(source, op, table.assign(**checked))


def _numbers(column: pd.Series, name: str, source: str) -> pd.Series:
    """The column as numbers. A size may be missing where it has a default, a time nowhere."""
    numbers = pd.to_numeric(column, errors="coerce")
    zero = name in MAY_BE_ZERO
    good = np.isfinite(numbers) & ((numbers >= 0) if zero else (numbers > 0))
    if name in DEFAULTS:
        good |= column.isna()
    if not good.all():
        row = int(np.flatnonzero(~good.to_numpy())[0])
        value = "missing" if pd.isna(column.iloc[row]) else column.iloc[row]
        row = int(column.index[row])
        kind = "non-negative" if zero else "positive"
        raise UserError(f"{source}: row {row + 2}: {name} is {value}, not a {kind} number")
    return numbers


def of_gpu(points: Points, names: Sequence[str]) -> Points:
    """The points whose `gpu` is one of the names (in any spelling); all, without such a column."""
    return Points(points.source, points.op, rows_of_gpu(points.table, names))


def rows_of_gpu(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The rows of a table whose `gpu` is one of the names, as `of_gpu`."""
    if "gpu" not in table:
        return table
    wanted = {normalise(n) for n in names}
    spelled = table["gpu"].astype(str)
    mine = spelled.map({s: normalise(s) in wanted for s in spelled.unique()}).astype(bool)
    return table[mine]
