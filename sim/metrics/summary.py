"""The summary of a run: every number of the JSON document, each defined once (here or below).

Measured requests are those that arrived at or after the end of the warm-up. Latencies are the
client's, of measured requests that completed; inter-token gaps are the engine's, of all requests.
`stability`, `time` and `kv` cover the whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cluster.records import STATUSES
from sim.cost.interface import PARTS, CostModel
from sim.engine.config import EngineConfig
from sim.engine.interface import Status
from sim.metrics.capacity import Capacity
from sim.metrics.distribution import NS, IntArray, describe, describe_weighted
from sim.metrics.kv import kv_summary
from sim.metrics.requests import BoolArray, RequestTimes
from sim.metrics.stability import as_section, assess
from sim.metrics.steps import StepDigest
from sim.scenario import SLO


@dataclass
class Observed:
    """What a finished run left behind."""

    rows: dict[str, IntArray]
    """`Records.columns()`, one row per request that arrived."""
    reasons: Sequence[str]
    digests: Sequence[StepDigest]
    """The steps of each replica."""
    times: RequestTimes
    num_blocks: int
    """Usable KV blocks of one replica."""
    config: EngineConfig
    cost: CostModel
    capacity: Capacity | None
    end_ns: int
    """When the simulation stopped."""


def summarise(seen: Observed, slo: SLO, warm_up_s: float) -> dict[str, Any]:
    """The sections that follow from what was observed; `run` and `trace` are the caller's."""
    rows, times, digests = seen.rows, seen.times, seen.digests
    measured = rows["arrival_ns"] >= round(warm_up_s * NS)
    span_s = _span_s(seen, times, measured)
    done = times.completed & measured
    section: dict[str, Any] = {"requests": _requests(seen, times, measured, warm_up_s)}
    section["ttft_s"] = describe(times.ttft_s[done])
    section["tpot_s"] = describe(times.tpot_s[done & ~np.isnan(times.tpot_s)])
    section["itl_s"] = _itl(digests)
    section["e2e_s"] = describe(times.e2e_s[done])
    section["queue_s"] = describe(times.queue_s[done])
    section["throughput"] = _throughput(rows, done, measured, span_s)
    section["goodput"] = _goodput(times, measured, slo, span_s)
    section["stability"] = _stability(seen, times)
    section["time"] = _time(digests, seen)
    section["kv"] = kv_summary(rows, digests, seen.config, seen.num_blocks)
    section["cost_model"] = seen.cost.describe()
    section["steps"] = sum(d.num_steps for d in digests)
    return section


def _span_s(seen: Observed, times: RequestTimes, measured: BoolArray) -> float:
    """From the first measured arrival until the last measured request was done, seconds."""
    if not measured.any():
        return 0.0
    start = int(seen.rows["arrival_ns"][measured].min())
    inside = bool((times.done_ns[measured] < 0).any())
    end = seen.end_ns if inside else int(times.done_ns[measured].max())
    return max(end - start, 0) / NS


def _requests(
    seen: Observed, times: RequestTimes, measured: BoolArray, warm_up_s: float
) -> dict[str, Any]:
    rows = seen.rows
    status = rows["status"]
    counts: dict[str, Any] = {"total": len(status)}
    for code, name in enumerate(STATUSES):
        counts[name.value] = int((status == code).sum())
    for name in (Status.REJECTED, Status.ABORTED, Status.UNFINISHED):
        why = rows["reason"][status == STATUSES.index(name)]
        codes, numbers = np.unique(why, return_counts=True)
        counts[f"{name.value}_by_reason"] = {
            seen.reasons[c] or "unspecified": int(k) for c, k in zip(codes, numbers, strict=True)
        }
    done = times.completed
    counts["one_token"] = int((done & (rows["output_tokens"] == 1)).sum())
    counts["truncated"] = int((done & (rows["output_tokens"] < rows["wanted_tokens"])).sum())
    counts["warm_up_s"] = warm_up_s
    counts["measured"] = int(measured.sum())
    return counts


def _itl(digests: Sequence[StepDigest]) -> dict[str, float | int | None]:
    """Every gap between two tokens of one request, all requests, that ended after the warm-up."""
    return describe_weighted([(d.gap_ns, d.gap_counts) for d in digests])


def _throughput(
    rows: dict[str, IntArray], done: BoolArray, measured: BoolArray, span_s: float
) -> dict[str, float | None]:
    """Over the time from the first measured arrival to the last measured request's end."""
    if not span_s:
        return dict.fromkeys(
            ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "span_s")
        )
    output = int(rows["output_tokens"][measured].sum())
    prompt = int(rows["prompt_tokens"][measured & (rows["first_token_ns"] >= 0)].sum())
    return {
        "requests_per_s": int(done.sum()) / span_s,
        "output_tokens_per_s": output / span_s,
        "total_tokens_per_s": (prompt + output) / span_s,
        "span_s": span_s,
    }


def _goodput(
    times: RequestTimes, measured: BoolArray, slo: SLO, span_s: float
) -> dict[str, float | None]:
    """Completed requests that meet every given limit, per second and as a part of all measured
    requests: one that was rejected, aborted or not finished has missed its SLO."""
    if not slo.given() or not measured.any():
        return {"requests_per_s": None, "slo_attainment": None}
    good = times.completed & measured
    if slo.ttft_s is not None:
        good &= times.ttft_s <= slo.ttft_s
    if slo.tpot_s is not None:
        good &= np.isnan(times.tpot_s) | (times.tpot_s <= slo.tpot_s)
    if slo.e2e_s is not None:
        good &= times.e2e_s <= slo.e2e_s
    number = int(good.sum())
    return {
        "requests_per_s": number / span_s if span_s else None,
        "slo_attainment": number / int(measured.sum()),
    }


def _stability(seen: Observed, times: RequestTimes) -> dict[str, Any]:
    rows = seen.rows
    rejected = rows["status"] == STATUSES.index(Status.REJECTED)
    at_the_door = int((rejected & (rows["replica"] < 0)).sum())
    timeout = np.array([reason == "timeout" for reason in seen.reasons], dtype=bool)
    aborted = rows["status"] == STATUSES.index(Status.ABORTED)
    return as_section(
        assess(
            rows["arrival_ns"],
            rows["first_scheduled_ns"],
            times.done_ns,
            at_the_door,
            seen.capacity,
            len(seen.digests),
            int(timeout[rows["reason"][aborted]].sum()),
        )
    )


def _time(digests: Sequence[StepDigest], seen: Observed) -> dict[str, float]:
    """Seconds summed over replicas, from the start of the simulation to its end. The parts of
    busy time are the cost model's; `idle` is when a replica had no step under way."""
    parts = {name: sum(d.parts_s[name] for d in digests) for name in PARTS}
    busy = sum(d.busy_s for d in digests)
    parts["idle"] = max(0.0, len(digests) * seen.end_ns / NS - busy)
    return parts
