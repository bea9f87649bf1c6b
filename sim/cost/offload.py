"""Host time of vLLM's KV offloading to CPU memory (`OffloadingConnector`), versions 0.11 to 0.17.

Read in `offloading_connector.py` and `kv_offload/lru_manager.py`: every block a request fills is
copied to CPU memory, and counts as being stored (so it cannot be evicted there) until the request
has finished. Once the running requests hold more blocks than the CPU has, those that do not fit try
again in every step: each try walks over all CPU blocks in vain and logs a warning. With long
outputs and many CPU blocks the scheduler then needs longer than the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.interface import PARTS, FloatArray, IntArray, StepShape, StepShapes
from sim.cost.step import StepCost

DEFAULT_CPU_GIB = 8
"""CPU memory of the pipeline that published the `is-*` deployments."""


@dataclass(frozen=True)
class StoreRetries:
    """What one futile try to store costs the scheduler."""

    us_per_cpu_block: float = 0.08
    """A step of the walk: 0.055 timed with the same data structures on an idle machine; the
    deployment that shows it (Mixtral, 4096 blocks) needs half as much again."""
    us_per_try: float = 25.0
    """Listing the request's blocks and one line of log."""
    share_waiting: float = 0.2
    """Of the requests whose blocks do fit, how many wait for room for the block just filled:
    room comes only when a request finishes."""


class OffloadingCost:
    """A cost model whose engine also stores its KV blocks in CPU memory."""

    def __init__(
        self,
        cost: StepCost,
        cpu_blocks: int,
        retries: StoreRetries | None = None,
        lookup_us: float = 1100.0,
    ) -> None:
        """`lookup_us`: how much later a request is queued, for the look-up in the CPU's cache."""
        retries = retries or StoreRetries()
        self._cost = cost
        self._cpu_tokens = float(cpu_blocks * cost.tables.engine.block_size)
        self._settled = 1.0 - retries.share_waiting
        self._retry_ns = 1e3 * (retries.us_per_try + retries.us_per_cpu_block * cpu_blocks)
        self._lookup_ns = round(lookup_us * 1e3)
        self._async = cost.tables.engine.async_scheduling
        host = cost.host
        self._base_ns = 1e3 * (host.async_us if self._async else 0.0)
        self._each_ns = 1e3 * (host.async_per_seq_us if self._async else 0.0)

    def step_ns(self, shape: StepShape) -> int:
        plain = self._cost.step_ns(shape)
        tokens = shape.decode_context
        for chunk, prefix in shape.prefills:
            tokens += chunk + prefix
        if tokens <= self._cpu_tokens:
            return plain
        sequences = shape.num_decodes + len(shape.prefills)
        stall = sequences * (1.0 - self._settled * self._cpu_tokens / tokens) * self._retry_ns
        if not self._async:
            return plain + int(stall + 0.5)
        return max(plain, int(self._base_ns + self._each_ns * sequences + stall + 0.5))

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        plain = self._cost.decode_run_ns(num_decodes, decode_context, decode_context_sq, n)
        if decode_context + num_decodes * (n - 1) <= self._cpu_tokens:
            return plain
        tokens = decode_context + num_decodes * np.arange(n, dtype=np.int64)
        return self._stalled(plain, np.full(n, num_decodes, dtype=np.int64), tokens)

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        parts = self._cost.parts_s(shapes)
        plain = sum(parts[name] for name in PARTS)
        steps = len(shapes.num_decodes)
        held = (shapes.chunk_tokens + shapes.chunk_prefix).astype(np.float64)
        chunks = np.bincount(shapes.chunk_step, minlength=steps)
        tokens = shapes.decode_context + np.bincount(
            shapes.chunk_step, weights=held, minlength=steps
        )
        plain_ns = np.rint(plain * 1e9).astype(np.int64)
        total = self._stalled(plain_ns, shapes.num_decodes + chunks, tokens.astype(np.int64))
        return {**parts, "host": parts["host"] + (total - plain_ns) * 1e-9}

    def arrival_ns(self, prompt_tokens: int) -> int:
        return self._cost.arrival_ns(prompt_tokens) + self._lookup_ns

    def delivery_ns(self, num_running: int) -> int:
        return self._cost.delivery_ns(num_running)

    def describe(self) -> dict[str, Any]:
        return self._cost.describe()

    def _stalled(self, plain: IntArray, sequences: IntArray, tokens: IntArray) -> IntArray:
        """As in `step_ns`, for many steps."""
        share = 1.0 - self._settled * self._cpu_tokens / np.maximum(tokens, 1)
        stall = sequences * share * self._retry_ns
        if not self._async:
            slow = plain + (stall + 0.5).astype(np.int64)
        else:
            host = self._base_ns + self._each_ns * sequences + stall
            slow = np.maximum(plain, (host + 0.5).astype(np.int64))
        result: IntArray = np.where(tokens <= self._cpu_tokens, plain, slow)
        return result


def cpu_blocks(kv_bytes_per_token: float, block_size: int, gib: float = DEFAULT_CPU_GIB) -> int:
    """Blocks in `gib` of CPU memory; `kv_bytes_per_token` over all GPUs of the replica."""
    return int(gib * 1024**3 // (kv_bytes_per_token * block_size))
