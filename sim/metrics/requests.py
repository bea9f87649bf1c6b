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


def token_times(rows: dict[str, IntArray], replica: int) -> IntArray:
    """When the first tokens of a replica's requests came out, then when the completed ones ended:
    the ends of steps that `digest` looks up for `client_times`."""
    begun, done = _of_replica(rows, replica)
    return np.concatenate((rows["first_token_ns"][begun], rows["finish_ns"][done]))


def client_times(
    rows: dict[str, IntArray], digests: Sequence[StepDigest], cost: CostModel
) -> RequestTimes:
    """`rows` as `Records.columns()` gives them; `digests` of all replicas, with `token_times`."""
    completed = rows["status"] == STATUSES.index(Status.COMPLETED)
    arrival = rows["arrival_ns"]
    first, last = rows["first_token_ns"].copy(), rows["finish_ns"].copy()
    for replica, steps in enumerate(digests):
        begun, done = _of_replica(rows, replica)
        delays = _delivery(cost, steps.running_at)
        first[begun] += delays[: len(begun)]
        last[done] += delays[len(begun) :]
    nan = np.nan
    ttft = np.where(first >= 0, (first - arrival) / NS, nan)
    e2e = np.where(completed, (last - arrival) / NS, nan)
    more = rows["output_tokens"] - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(completed & (more > 0), (last - first) / NS / more, nan)
    scheduled = rows["first_scheduled_ns"]
    queue = np.where(scheduled >= 0, (scheduled - arrival) / NS, nan)
    return RequestTimes(completed, ttft, tpot, e2e, queue, last)


def _of_replica(rows: dict[str, IntArray], replica: int) -> tuple[IntArray, IntArray]:
    """Indices of the requests that had a first token there, and of those completed there."""
    here = rows["replica"] == replica
    completed = rows["status"] == STATUSES.index(Status.COMPLETED)
    return np.flatnonzero(here & (rows["first_token_ns"] >= 0)), np.flatnonzero(here & completed)


def _delivery(cost: CostModel, running: IntArray) -> IntArray:
    """How long the tokens of steps with so many running requests travel to their clients."""
    counts, where = np.unique(running, return_inverse=True)
    delays = np.array([cost.delivery_ns(int(n)) for n in counts], dtype=np.int64)
    return delays[where] if len(delays) else np.zeros_like(running)
