"""Where KV memory goes: used, and the three ways of wasting it (PagedAttention, §3.1 and §6.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.engine.config import EngineConfig
from sim.metrics.distribution import NS, FloatArray, IntArray
from sim.metrics.steps import StepDigest
from sim.protocols import SchedulingPolicy


def keeps_more_than_it_uses(policy: SchedulingPolicy) -> bool:
    """Does the policy waste KV memory in ways that only a look at every step shows?"""
    return policy.reserve not in ("on-demand", "prompt") or policy.layout != "paged"


def kv_summary(
    rows: dict[str, IntArray], digests: Sequence[StepDigest], config: EngineConfig, num_blocks: int
) -> dict[str, object]:
    """The summary's `kv` section; `num_blocks` are the usable blocks of one replica."""
    admitted = rows["first_scheduled_ns"] >= 0
    prompt = int(rows["prompt_tokens"][admitted].sum())
    cached = int(rows["cached_tokens"][admitted].sum())
    peak = max((d.peak_used_blocks for d in digests), default=0)
    return {
        "num_blocks": num_blocks,
        "block_size": config.block_size,
        "capacity_tokens": num_blocks * config.block_size,
        "prefix_hit_rate": cached / prompt if prompt else 0.0,
        "cached_tokens": cached,
        "preemptions": int(rows["preemptions"].sum()),
        "recomputed_tokens": int(rows["recomputed_tokens"].sum()),
        "peak_usage": peak / num_blocks,
        "mean_usage": _busy_mean(digests, [d.mean_used_blocks for d in digests]) / num_blocks,
        "mean_running": _busy_mean(digests, [d.mean_running for d in digests]),
        "waste": _waste(rows, digests, config.block_size, num_blocks),
    }


def _waste(
    rows: dict[str, IntArray], digests: Sequence[StepDigest], block_size: int, num_blocks: int
) -> dict[str, float]:
    """Fractions of one replica's KV memory, averaged over busy time.

    * `internal_fragmentation`: the empty rest of each request's last block.
    * `reserved_unused`: blocks set aside for tokens that are not there (yet); `never_used` is the
      part of it for tokens that never come.
    * `external_fragmentation`: free memory that the next request could have if it were in one
      piece.

    Policies that allocate on demand waste only the first kind.
    """
    memory = num_blocks * block_size
    noted = [d.mean_waste for d in digests]
    found = dict.fromkeys(("internal", "reserved", "never_used", "external"), 0.0)
    if all(waste is not None for waste in noted):
        for name in found:
            found[name] = _busy_mean(digests, [w[name] for w in noted if w is not None]) / memory
    elif busy_s := sum(d.busy_s for d in digests):
        found["internal"] = _rest_on_demand(rows, block_size) / busy_s / memory
    waste = {
        "internal_fragmentation": found["internal"],
        "reserved_unused": found["reserved"] + found["never_used"],
        "never_used": found["never_used"],
        "external_fragmentation": found["external"],
    }
    waste["total"] = sum(waste.values()) - waste["never_used"]
    return waste


def _rest_on_demand(rows: dict[str, IntArray], block_size: int) -> float:
    """Slot-seconds of the empty rests of last blocks, all requests.

    A request's average rest over its decode is exact; it is weighted with the time from its first
    to its last token. (Preemptions and prefills are left out: they are short.)
    """
    first, finish = rows["first_token_ns"], rows["finish_ns"]
    decode_s = np.where((first >= 0) & (finish >= first), finish - first, 0) / NS
    rest = _mean_rest(rows["prompt_tokens"], rows["output_tokens"], block_size)
    return float(np.dot(rest, decode_s))


def _mean_rest(prompt: IntArray, output: IntArray, block: int) -> FloatArray:
    """Average of (-tokens) mod block over the decode, tokens = prompt + 1 ... prompt + output - 1.

    (The last token is never stored.)
    """
    count = np.maximum(output - 1, 0)

    def upto(n: IntArray) -> IntArray:  # sum of (-t) mod block for t = 1 ... n
        whole, part = n // block, n % block
        return whole * (block * (block - 1) // 2) + part * (2 * block - 1 - part) // 2

    total = upto(prompt + count) - upto(prompt)
    return np.where(count > 0, total / np.maximum(count, 1), 0.0)


def _busy_mean(digests: Sequence[StepDigest], values: Sequence[float]) -> float:
    busy_s = sum(d.busy_s for d in digests)
    if not busy_s:
        return 0.0
    return sum(v * d.busy_s for v, d in zip(values, digests, strict=True)) / busy_s
