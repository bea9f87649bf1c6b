"""What the summary needs of one replica's step log, taken in one pass so that only one replica's
expanded table is in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.cost.interface import PARTS, CostModel
from sim.engine.log import StepLog
from sim.metrics.distribution import NS, IntArray, merge_equal


@dataclass
class StepDigest:
    """One replica's steps, summed up. Averages are over busy time."""

    num_steps: int
    busy_s: float
    """Time in which at least one step was under way."""
    parts_s: dict[str, float]
    gap_ns: IntArray
    gap_counts: IntArray
    """Inter-token gaps and how many of each, sorted."""
    peak_used_blocks: int
    mean_used_blocks: float
    mean_blocked_free_blocks: float
    """Free blocks, averaged over busy time, counted only while requests wait for a slot."""
    mean_running: float
    preemptions: int
    cached_tokens: int
    prefill_tokens: int
    output_tokens: int
    """Tokens sampled, as far as the steps tell (speculation aside)."""


def digest(log: StepLog, cost: CostModel, num_blocks: int, max_num_seqs: int) -> StepDigest:
    """Sum up `log`; `num_blocks` are the usable KV blocks, `max_num_seqs` the slots."""
    table = log.table()
    start, end = table["start_ns"], table["end_ns"]
    used = table["kv_used_blocks"]
    # Pipeline stages overlap steps: count a moment once.
    begun = np.maximum(start, np.concatenate((start[:1], np.maximum.accumulate(end)[:-1])))
    busy = np.maximum(end - begun, 0)
    total = int(busy.sum())
    blocked = (table["num_waiting"] > 0) & (table["num_running"] < max_num_seqs)
    gap_ns, gap_counts = merge_equal(*log.gaps())
    return StepDigest(
        num_steps=len(log),
        busy_s=total / NS,
        parts_s=_parts(log, cost),
        gap_ns=gap_ns,
        gap_counts=gap_counts,
        peak_used_blocks=int(used.max(initial=0)),
        mean_used_blocks=_mean(used, busy, total),
        mean_blocked_free_blocks=_mean((num_blocks - used) * blocked, busy, total),
        mean_running=_mean(table["num_running"], busy, total),
        preemptions=int(table["num_preempted"].sum()),
        cached_tokens=int(table["cached_tokens"].sum()),
        prefill_tokens=int(table["prefill_tokens"].sum()),
        output_tokens=int(table["num_sampled"].sum()),
    )


def _parts(log: StepLog, cost: CostModel) -> dict[str, float]:
    if not len(log):
        return dict.fromkeys(PARTS, 0.0)
    parts = cost.parts_s(log.shapes())
    return {name: float(parts[name].sum()) for name in PARTS}


def _mean(values: IntArray, weights: IntArray, total: int) -> float:
    return float(np.dot(values.astype(np.float64), weights) / total) if total else 0.0


def running_at(log: StepLog, times_ns: IntArray) -> IntArray:
    """Requests running in the step that ended at each of `times_ns` (0 where none did)."""
    table = log.table()
    end, running = table["end_ns"], table["num_running"]
    if not len(end):
        return np.zeros_like(times_ns)
    at = np.minimum(np.searchsorted(end, times_ns), len(end) - 1)
    return np.where(end[at] == times_ns, running[at], 0)
