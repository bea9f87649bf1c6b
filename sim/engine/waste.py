"""Where KV memory goes in a step: tokens, and the ways of wasting it.

Source of the distinctions: Kwon et al., PagedAttention, SOSP 2023, §3.1 and §6.2.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.engine.intake import outputs_until_stop
from sim.engine.kv_cache import blocks_for
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence

IntArray = npt.NDArray[np.int64]


class KvUse(NamedTuple):
    """One replica's KV slots (one token each) in one step. What is not listed is free to use."""

    tokens: int
    """Slots that hold tokens of unfinished requests (shared ones counted for every holder)."""
    internal: int
    """The empty rest of each request's last block: internal fragmentation of the pages."""
    reserved: int
    """Blocks set aside beyond the last, for tokens that will come."""
    never_used: int
    """Blocks set aside for tokens that will never come (and all of a finished request that keeps
    its place in a batch). This looks at true output lengths: it is a measurement, no decision."""
    external: int
    """Free slots that the next waiting request cannot have, though they would be enough, because
    they are not neighbours: external fragmentation."""


def kv_use(scheduler: Scheduler) -> KvUse:
    """The KV memory after the last `schedule()`."""
    size = scheduler.cache.block_size
    tokens = internal = reserved = never_used = 0
    for seq in scheduler.running:
        stored = min(seq.num_computed_tokens, len(seq.blocks) * size)
        used_blocks = blocks_for(stored, size)
        final = seq.prompt_tokens + outputs_until_stop(scheduler.config, seq.request) - 1
        future_blocks = max(blocks_for(final, size) - used_blocks, 0)
        spare_blocks = len(seq.blocks) - used_blocks
        tokens += stored
        internal += used_blocks * size - stored
        reserved += min(spare_blocks, future_blocks) * size
        never_used += max(spare_blocks - future_blocks, 0) * size
    never_used += sum(len(seq.blocks) for seq in scheduler.lingering) * size
    return KvUse(tokens, internal, reserved, never_used, _stranded(scheduler) * size)


def _stranded(scheduler: Scheduler) -> int:
    """Free blocks out of reach for the first in the queue for want of neighbours."""
    pool = scheduler.cache.pool
    head: Sequence | None = next(iter(scheduler.waiting), None)
    if head is None:
        return 0
    tokens = max(head.num_tokens, scheduler.rules.reserved_tokens(head))
    blocks = blocks_for(min(tokens, scheduler.cache.max_model_len), scheduler.cache.block_size)
    if blocks <= pool.num_free and not pool.free.fits(blocks):
        return pool.num_free
    return 0


class WasteLog:
    """`KvUse` of every row of a step log, in columns."""

    def __init__(self) -> None:
        self._values = array("q")

    def __len__(self) -> int:
        return len(self._values) // len(KvUse._fields)

    def add(self, use: KvUse) -> None:
        self._values.extend(use)

    def table(self) -> dict[str, IntArray]:
        """One array per field of `KvUse`, one value per row."""
        matrix = np.array(self._values, dtype=np.int64).reshape(-1, len(KvUse._fields))
        return dict(zip(KvUse._fields, matrix.T, strict=True))
