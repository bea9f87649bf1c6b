"""vLLM's eviction: the least recently used cached block goes first."""

from __future__ import annotations

from dataclasses import dataclass

from sim.protocols import BlockView, EvictionPolicy


@dataclass
class LRU(EvictionPolicy):
    """The block unused for longest; within one request the end of the sequence before its start.

    Source: vLLM 0.33.0 `v1/core/kv_cache_utils.py`, the free block queue.
    """

    free_queue = True

    def order(self, block: BlockView) -> int:
        return block.freed_seq
