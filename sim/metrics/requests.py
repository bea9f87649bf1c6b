"""Every request as its client saw it: columns of nanoseconds, vectorised.

Definitions (used everywhere): `ttft` from sending to the first token at the client; `e2e` to the
last one; `tpot` = (e2e - ttft) / (output tokens - 1), for completed requests with more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.cluster.records import STATUSES
from sim.cost.interface import CostModel
from sim.engine.interface import Status
from sim.metrics.distribution import NS, FloatArray, IntArray
from sim.metrics.steps import StepDigest

BoolArray = npt.NDArray[np.bool_]


@dataclass
class RequestTimes:
    """Client-side latencies, equally long as the rows; NaN where a request has none. Seconds."""

    completed: BoolArray
    ttft_s: FloatArray
    """Also of requests that were aborted or are unfinished but had their first token."""
    tpot_s: FloatArray
    e2e_s: FloatArray
    """Completed requests only."""
    queue_s: FloatArray
    """From sending to the start of the first step that worked on it."""
    done_ns: IntArray
    """When the client had everything (completed) or the request left; -1: still inside."""


def client_times(
    rows: dict[str, IntArray], digests: Sequence[StepDigest], cost: CostModel
) -> RequestTimes:
    """`rows` as `Records.columns()` gives them, `digests` of all replicas."""
    completed = rows["status"] == STATUSES.index(Status.COMPLETED)
    arrival = rows["arrival_ns"]
    first, last = rows["first_token_ns"].copy(), rows["finish_ns"].copy()
    for replica, steps in enumerate(digests):
        here = rows["replica"] == replica
        begun, done = here & (first >= 0), here & completed
        first[begun] += _delivery(steps, cost, first[begun])
        last[done] += _delivery(steps, cost, last[done])
    nan = np.nan
    ttft = np.where(first >= 0, (first - arrival) / NS, nan)
    e2e = np.where(completed, (last - arrival) / NS, nan)
    more = rows["output_tokens"] - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(completed & (more > 0), (last - first) / NS / more, nan)
    scheduled = rows["first_scheduled_ns"]
    queue = np.where(scheduled >= 0, (scheduled - arrival) / NS, nan)
    return RequestTimes(completed, ttft, tpot, e2e, queue, last)


def _delivery(steps: StepDigest, cost: CostModel, ends_ns: IntArray) -> IntArray:
    """How long the tokens of the steps that ended at `ends_ns` travel to their clients."""
    counts, where = np.unique(steps.running_at(ends_ns), return_inverse=True)
    delays = np.array([cost.delivery_ns(int(n)) for n in counts], dtype=np.int64)
    return delays[where] if len(delays) else np.zeros_like(ends_ns)
