"""From the records of one simulated run to the metrics that the publications report.

Definitions as in the README of `ground_truth`: latencies over completed requests, milliseconds,
from sending (or from the engine's queue where the publication counts so); tpot = (e2e - ttft) /
(output tokens - 1); throughput over the time from the first sending to the last answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.cost.interface import CostModel
from sim.metrics.requests import client_times
from sim.metrics.steps import StepDigest

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
    digests: Sequence[StepDigest],
    cost: CostModel,
    stage_of: Sequence[int],
    from_queue: bool = False,
) -> Values:
    """All metrics of every stage and of the whole run; NaN for what no request completed. `rows` as
    `Records.columns()` gives them, `digests` of all replicas."""
    times = client_times(dict(rows), digests, cost)
    offset: Array = np.zeros(len(rows["uid"]))
    if from_queue:
        offset = (rows["queued_ns"] - rows["arrival_ns"]) * 1e-9
    columns: dict[str, Array] = {
        "ttft": (times.ttft_s - offset) * 1e3,
        "tpot": times.tpot_s * 1e3,
        "e2e": (times.e2e_s - offset) * 1e3,
        "sent_s": rows["arrival_ns"] * 1e-9,
        "done_s": times.done_ns * 1e-9,
        "tokens": rows["output_tokens"].astype(np.float64),
    }
    return summarise(columns, times.completed, np.asarray(stage_of)[rows["uid"]])


def summarise(
    columns: Mapping[str, Array], ok: npt.NDArray[np.bool_], stage: npt.NDArray[np.int64]
) -> Values:
    """Per stage and for the whole run. `columns`: ttft, tpot, e2e (ms), sent_s, done_s, tokens."""
    values: Values = {}
    for number in [*np.unique(stage).tolist(), -1]:
        here = np.ones_like(ok) if number < 0 else stage == number
        good = here & ok
        for latency in LATENCIES:
            _distribution(values, number, latency, columns[latency][good])
        span = columns["done_s"][good].max(initial=0.0) - columns["sent_s"][here].min()
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
