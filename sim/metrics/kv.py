"""Where KV memory goes: used, and the three ways of wasting it (PagedAttention, §3.1 and §6.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.engine.config import EngineConfig
from sim.metrics.distribution import NS, FloatArray, IntArray
from sim.metrics.requests import RequestTimes
from sim.metrics.steps import StepDigest
from sim.protocols import SchedulingPolicy


def kv_summary(
    rows: dict[str, IntArray],
    times: RequestTimes,
    digests: Sequence[StepDigest],
    config: EngineConfig,
    policy: SchedulingPolicy,
    num_blocks: int,
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
        "waste": _waste(rows, digests, config, policy, num_blocks),
    }


def _waste(
    rows: dict[str, IntArray],
    digests: Sequence[StepDigest],
    config: EngineConfig,
    policy: SchedulingPolicy,
    num_blocks: int,
) -> dict[str, float]:
    """Fractions of one replica's KV memory, averaged over busy time.

    * `internal_fragmentation`: the empty rest of each request's last block. A request's average
      over its decode is exact; it is weighted with its time from first to last token.
    * `reserved_unused`: blocks set aside for tokens that are not there (yet): what is used beyond
      the tokens and the rests, for policies that reserve ahead; 0 on demand.
    * `external_fragmentation`: free blocks that no waiting request could have, in layouts that
      need neighbouring blocks.
    """
    block = config.block_size
    memory = num_blocks * block
    busy_s = sum(d.busy_s for d in digests)
    if not busy_s:
        return dict.fromkeys(
            ("internal_fragmentation", "reserved_unused", "external_fragmentation", "total"), 0.0
        )
    prefill_s, decode_s = _phases(rows)
    prompt, output = rows["prompt_tokens"], rows["output_tokens"]
    rest = float(np.dot(_mean_rest(prompt, output, block), decode_s)) / busy_s
    reserved = external = 0.0
    if policy.reserve not in ("on-demand", "prompt"):
        tokens = float(np.dot(prompt + output / 2, decode_s) + np.dot(prompt / 2, prefill_s))
        used = _busy_mean(digests, [d.mean_used_blocks for d in digests]) * block
        reserved = max(0.0, used - tokens / busy_s - rest)
    if policy.layout != "paged":
        external = _busy_mean(digests, [d.mean_blocked_free_blocks for d in digests]) * block
    parts = {
        "internal_fragmentation": rest / memory,
        "reserved_unused": reserved / memory,
        "external_fragmentation": external / memory,
    }
    return {**parts, "total": sum(parts.values())}


def _phases(rows: dict[str, IntArray]) -> tuple[FloatArray, FloatArray]:
    """Seconds each request spent from first scheduling to first token, and from there to its end.

    Requests still inside when the simulation stopped count as if they had just arrived: 0.
    """
    start, first, finish = rows["first_scheduled_ns"], rows["first_token_ns"], rows["finish_ns"]
    decoding = (first >= 0) & (finish >= first)
    until = np.where(first >= 0, first, finish)
    prefilling = (start >= 0) & (until >= start)
    return (
        np.where(prefilling, until - start, 0) / NS,
        np.where(decoding, finish - first, 0) / NS,
    )


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
