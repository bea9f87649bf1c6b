"""From the records of one simulated run to the metrics that the publications report.

Definitions as in the README of `ground_truth`: latencies over completed requests, milliseconds,
from sending (or from the engine's queue where the publication counts so); tpot = (e2e - ttft) /
(output tokens - 1); throughput over the time from the first sending until the last request was
answered or given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.cluster.records import STATUSES
from sim.cost.interface import CostModel
from sim.engine.interface import Status
from sim.engine.log import StepLog

Array = npt.NDArray[Any]
Values = dict[tuple[int, str], float]
"""(stage, metric) -> value; stage -1 is the whole run."""

LATENCIES = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
METRICS = (
    *(f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS),
    "req_per_s",
    "output_tok_per_s",
    "makespan_s",
    "fail_frac",
)


def measure(
    rows: Mapping[str, Array],
    logs: Sequence[StepLog],
    cost: CostModel,
    stage_of: Sequence[int],
    from_queue: bool = False,
) -> Values:
    """All metrics of every stage and of the whole run; NaN for what no request completed. `rows` as
    `Records.columns()` gives them, `logs` of all replicas."""
    completed = rows["status"] == STATUSES.index(Status.COMPLETED)
    first = rows["first_token_ns"].astype(np.float64)
    last = rows["finish_ns"].astype(np.float64)
    for replica, log in enumerate(logs):
        here = completed & (rows["replica"] == replica)
        table = log.table()
        for times in (first, last):
            times[here] += _delivery_ns(table, cost, times[here])
    begin = rows["queued_ns"] if from_queue else rows["arrival_ns"]
    more = np.maximum(rows["output_tokens"] - 1, 1)
    columns: dict[str, Array] = {
        "ttft": (first - begin) * 1e-6,
        "tpot": np.where(rows["output_tokens"] > 1, (last - first) / more * 1e-6, np.nan),
        "e2e": (last - begin) * 1e-6,
        "sent_s": rows["arrival_ns"] * 1e-9,
        "left_s": last * 1e-9,
        "tokens": rows["output_tokens"].astype(np.float64),
    }
    return summarise(columns, completed, np.asarray(stage_of)[rows["uid"]])


def _delivery_ns(table: Mapping[str, Array], cost: CostModel, ends_ns: Array) -> Array:
    """How long the tokens of the steps that ended at `ends_ns` travel to their clients."""
    at = np.searchsorted(table["end_ns"], ends_ns)
    counts, where = np.unique(table["num_running"][at], return_inverse=True)
    delays = np.array([cost.delivery_ns(int(n)) for n in counts], dtype=np.float64)
    return delays[where] if len(delays) else np.zeros_like(ends_ns)


def summarise(
    columns: Mapping[str, Array], ok: npt.NDArray[np.bool_], stage: npt.NDArray[np.int64]
) -> Values:
    """Per stage and for the whole run. `columns`: ttft, tpot, e2e (ms), sent_s, left_s (answered,
    or given up), tokens."""
    values: Values = {}
    for number in [*np.unique(stage).tolist(), -1]:
        here = np.ones_like(ok) if number < 0 else stage == number
        good = here & ok
        for latency in LATENCIES:
            _distribution(values, number, latency, columns[latency][good])
        span = columns["left_s"][here].max() - columns["sent_s"][here].min()
        values[number, "makespan_s"] = span
        values[number, "req_per_s"] = good.sum() / span if good.any() else 0.0
        tokens = columns["tokens"][good].sum()
        values[number, "output_tok_per_s"] = tokens / span if good.any() else 0.0
        values[number, "fail_frac"] = 1.0 - good.sum() / here.sum()
    return values


def _distribution(values: Values, stage: int, name: str, sample: Array) -> None:
    sample = sample[~np.isnan(sample)]
    values[stage, f"{name}_mean"] = float(sample.mean()) if len(sample) else np.nan
    for q in (50, 90, 99):
        found = float(np.percentile(sample, q)) if len(sample) else np.nan
        values[stage, f"{name}_p{q}"] = found


def mean_of_seeds(runs: Sequence[Values]) -> Values:
    """The average of every metric over runs of one experiment."""
    return {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
