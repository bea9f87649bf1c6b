"""A block pool in which a policy says which cached block is evicted first."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sim.engine.block_pool import NULL_BLOCK, BlockPool
from sim.engine.queues import checked_key, not_an_order
from sim.protocols import EvictionPolicy


@dataclass(slots=True)
class CachedBlock:
    """A `sim.protocols.BlockView`."""

    content: int
    depth: int
    cached_seq: int
    freed_seq: int = 0
    num_hits: int = 0


class RankedFreeBlocks:
    """Free blocks: those without content as in vLLM's free queue, then by the policy's order."""

    def __init__(self, blocks: Iterable[int], policy: EvictionPolicy) -> None:
        self._policy = policy
        self._unnamed = deque(blocks)
        self._heap: list[tuple[Any, int, int]] = []  # (order, when freed, block)
        self._freed: dict[int, int] = {}  # named free blocks and when they were freed
        self._clock = 0
        self.notes: dict[int, CachedBlock] = {}

    def tick(self) -> int:
        """The next sequence number."""
        self._clock += 1
        return self._clock

    def __len__(self) -> int:
        return len(self._unnamed) + len(self._freed)

    def __iter__(self) -> Iterator[int]:
        yield from self._unnamed
        yield from (block for _, freed, block in sorted(self._heap) if self._is_free(freed, block))

    def _is_free(self, freed: int, block: int) -> bool:
        return self._freed.get(block) == freed

    def fits(self, count: int) -> bool:
        return count <= len(self)

    def take(self, count: int) -> list[int]:
        taken = [self._unnamed.popleft() for _ in range(min(count, len(self._unnamed)))]
        while len(taken) < count:
            _, freed, block = heapq.heappop(self._heap)
            if self._is_free(freed, block):
                del self._freed[block]
                taken.append(block)
        return taken

    def remove(self, block: int) -> None:
        del self._freed[block]
        if len(self._heap) > 2 * len(self._freed) + 64:
            self._heap = [entry for entry in self._heap if self._is_free(entry[1], entry[2])]
            heapq.heapify(self._heap)

    def put(self, unnamed: list[int], named: list[int]) -> None:
        self._unnamed.extendleft(reversed(unnamed))
        for block in named:
            note = self.notes[block]
            note.freed_seq = freed = self._freed[block] = self.tick()
            order = checked_key(self._policy.order(note), "order()")
            try:
                heapq.heappush(self._heap, (order, freed, block))
            except TypeError as error:
                raise not_an_order(str(error), "order()") from None


class RankedPool(BlockPool):
    """Keeps the counters that eviction policies look at."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self._ranked = RankedFreeBlocks(range(1, num_blocks), policy)
        super().__init__(num_blocks, self._ranked)

    def register(self, block: int, name: int, depth: int) -> None:
        super().register(block, name, depth)
        self._ranked.notes[block] = CachedBlock(name, depth, self._ranked.tick())

    def touch(self, blocks: Iterable[int]) -> None:
        hit = [block for block in blocks if block != NULL_BLOCK]
        super().touch(hit)
        for block in hit:
            self._ranked.notes[block].num_hits += 1
