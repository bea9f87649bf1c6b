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
    end_ns: IntArray
    num_running: IntArray
    """Of every step, in order of time."""
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

    def running_at(self, times_ns: IntArray) -> IntArray:
        """Requests running in the step that ended at each of `times_ns` (0 where none did)."""
        if not self.num_steps:
            return np.zeros_like(times_ns)
        at = np.minimum(np.searchsorted(self.end_ns, times_ns), self.num_steps - 1)
        return np.where(self.end_ns[at] == times_ns, self.num_running[at], 0)


def digest(
    log: StepLog, cost: CostModel, waste: WasteLog | None = None, warm_up_ns: int = 0
) -> StepDigest:
    """Sum up `log`, and what the engine noted of its KV memory in each of its steps. Gaps that
    end before `warm_up_ns` are left out; all else covers the whole run."""
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
        end_ns=end,
        num_running=table["num_running"],
        busy_s=total / NS,
        parts_s=_parts(log, table, cost),
        gap_ns=gap_ns,
        gap_counts=gap_counts,
        peak_used_blocks=int(used.max(initial=0)),
        mean_used_blocks=_mean(used, busy, total),
        mean_waste=_mean_waste(waste, busy, total) if waste is not None else None,
        mean_running=_mean(table["num_running"], busy, total),
    )


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
