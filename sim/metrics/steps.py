"""What the summary needs of one replica's step log, taken in one pass so that only one replica's
expanded table is in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.cost.interface import PARTS, CostModel
from sim.engine.log import StepLog
from sim.engine.waste import WasteLog
from sim.metrics.distribution import NS, IntArray


@dataclass
class StepDigest:
    """One replica's steps, summed up. Averages are over busy time."""

    num_steps: int
    busy_s: float
    """Time in which at least one step was under way."""
    parts_s: dict[str, float]
    gap_ns: IntArray
    gap_counts: IntArray
    """Inter-token gaps and how many of each."""
    peak_used_blocks: int
    mean_used_blocks: float
    mean_waste: dict[str, float] | None
    """KV slots by `KvUse` field, where the engine kept a `WasteLog`."""
    mean_running: float
    running_at: IntArray
    """Requests running in the step that ended at each of the given times (0 where none did)."""


def digest(
    log: StepLog,
    cost: CostModel,
    times_ns: IntArray,
    waste: WasteLog | None = None,
    warm_up_ns: int = 0,
) -> StepDigest:
    """Sum up `log`, and what the engine noted of its KV memory in each of its steps. `times_ns`
    are ends of steps to look up. Gaps that end before `warm_up_ns` are left out; all else covers
    the whole run."""
    table = log.table()
    start, end = table["start_ns"], table["end_ns"]
    used = table["kv_used_blocks"]
    # Pipeline stages overlap steps: count a moment once.
    begun = np.maximum(start, np.concatenate((start[:1], np.maximum.accumulate(end)[:-1])))
    busy = np.maximum(end - begun, 0)
    total = int(busy.sum())
    gap_ns, gap_counts = log.gaps(table, warm_up_ns)
    return StepDigest(
        num_steps=len(log),
        busy_s=total / NS,
        parts_s=_parts(log, table, cost),
        gap_ns=gap_ns,
        gap_counts=gap_counts,
        peak_used_blocks=int(used.max(initial=0)),
        mean_used_blocks=_mean(used, busy, total),
        mean_waste=_mean_waste(waste, busy, total) if waste is not None else None,
        mean_running=_mean(table["num_running"], busy, total),
        running_at=_running_at(end, table["num_running"], times_ns),
    )


def _running_at(end_ns: IntArray, running: IntArray, times_ns: IntArray) -> IntArray:
    if not len(end_ns):
        return np.zeros_like(times_ns)
    at = np.minimum(np.searchsorted(end_ns, times_ns), len(end_ns) - 1)
    return np.where(end_ns[at] == times_ns, running[at], 0)


def _parts(log: StepLog, table: dict[str, IntArray], cost: CostModel) -> dict[str, float]:
    if not len(log):
        return dict.fromkeys(PARTS, 0.0)
    parts = cost.parts_s(log.shapes(table))
    return {name: float(parts[name].sum()) for name in PARTS}


def _mean_waste(waste: WasteLog, busy: IntArray, total: int) -> dict[str, float]:
    # A step that was planned and not finished has its waste noted, but no row.
    table = waste.table()
    return {name: _mean(values[: len(busy)], busy, total) for name, values in table.items()}


def _mean(values: IntArray, weights: IntArray, total: int) -> float:
    return float(np.dot(values.astype(np.float64), weights) / total) if total else 0.0
