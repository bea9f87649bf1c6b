"""KV blocks: who holds them, which are free, which are in the prefix cache.

Block 0 is the null block, a placeholder that nobody owns; blocks 1 to n-1 are usable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

NULL_BLOCK = 0


class FreeBlocks(Protocol):
    """The free blocks of a pool in the order in which they are taken."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def fits(self, count: int) -> bool:
        """Could `take(count)` succeed now?"""
        ...

    def take(self, count: int) -> list[int]:
        """Remove `count` blocks. Only after `fits(count)`."""
        ...

    def remove(self, block: int) -> None:
        """Remove one block wherever it is (a prefix hit brings it back to life)."""
        ...

    def put(self, unnamed: list[int], named: list[int]) -> None:
        """Add blocks without content worth keeping, and blocks with, each list in order of
        its eviction."""
        ...


class FreeQueue:
    """vLLM's free queue. Blocks are taken at the front; blocks with cached content join at the
    back (so the least recently freed goes first), others at the front (last in, first out)."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(blocks)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue)

    def fits(self, count: int) -> bool:
        return count <= len(self._queue)

    def take(self, count: int) -> list[int]:
        pop = self._queue.popitem
        return [pop(last=False)[0] for _ in range(count)]

    def remove(self, block: int) -> None:
        del self._queue[block]

    def put(self, unnamed: list[int], named: list[int]) -> None:
        queue = self._queue
        for block in reversed(unnamed):
            queue[block] = None
            queue.move_to_end(block, last=False)
        for block in named:
            queue[block] = None


class BlockPool:
    """Reference counts, the free blocks and the map from names to cached blocks.

    Equal content may sit in several blocks (nothing is de-duplicated); a lookup answers with the
    one registered first among those alive.
    """

    def __init__(self, num_blocks: int, free: FreeBlocks | None = None) -> None:
        """`num_blocks` counts the null block."""
        self.num_blocks = num_blocks
        self.free: FreeBlocks = free if free is not None else FreeQueue(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.names: list[int | None] = [None] * num_blocks
        self._cached: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - 1 - len(self.free)

    def take(self, count: int) -> list[int]:
        """`count` blocks for one new holder; what they had cached is evicted."""
        taken = self.free.take(count)
        for block in taken:
            if self.names[block] is not None:
                self._evict(block)
            self.refs[block] = 1
        return taken

    def lookup(self, name: int) -> int | None:
        """A block whose content has this name."""
        blocks = self._cached.get(name)
        return blocks[0] if blocks else None

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a holder to cached blocks."""
        refs = self.refs
        for block in blocks:
            if block != NULL_BLOCK:
                if refs[block] == 0:
                    self.free.remove(block)
                refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one holder from each block, in order of their eviction."""
        refs, names = self.refs, self.names
        unnamed: list[int] = []
        named: list[int] = []
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            refs[block] -= 1
            if refs[block] == 0:
                (unnamed if names[block] is None else named).append(block)
        self.free.put(unnamed, named)

    def register(self, block: int, name: int, depth: int) -> None:
        """Enter a held block into the cache; `depth` blocks come before it in its prefix."""
        self.names[block] = name
        self._cached.setdefault(name, []).append(block)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks are in the free queue."""
        refs = self.refs
        return sum(1 for block in blocks if block != NULL_BLOCK and refs[block] == 0)

    def cached_names(self) -> Iterable[int]:
        return self._cached.keys()

    def _evict(self, block: int) -> None:
        name = self.names[block]
        assert name is not None
        self.names[block] = None
        twins = self._cached[name]
        twins.remove(block)
        if not twins:
            del self._cached[name]

    def check_integrity(self, held: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the books agree with `held`, the block tables in use."""
        refs = [0] * self.num_blocks
        for table in held:
            for block in table:
                refs[block] += 1
        refs[NULL_BLOCK] = self.refs[NULL_BLOCK]
        assert refs == self.refs, "reference counts differ from the block tables"
        free = list(self.free)
        assert len(free) == len(set(free)) == len(self.free), "the free queue repeats a block"
        assert set(free) == {b for b in range(1, self.num_blocks) if not refs[b]}, (
            "a block is neither free nor held, or both"
        )
        listed = {b: n for n, blocks in self._cached.items() for b in blocks}
        named = {b: n for b, n in enumerate(self.names) if n is not None}
        assert listed == named, "the cache lists other blocks than those with names"
        assert all(self._cached.values()), "an empty cache entry"
