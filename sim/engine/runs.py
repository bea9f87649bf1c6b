"""Free KV blocks for layouts without pages: an allocation is one run of neighbouring blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from sim.engine.intake import power_of_two


class FreeRuns:
    """Maximal runs of free blocks, first fit. A `take` gives one run.

    With `buddy` an allocation is rounded up to a power of two and starts at a multiple of its
    size, and all of it belongs to whoever asked.
    """

    def __init__(self, blocks: Iterable[int], buddy: bool = False) -> None:
        self._buddy = buddy
        self._runs: list[tuple[int, int]] = []  # (first block, one past the last), sorted
        self._count = 0
        self.put(list(blocks), [])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (block for start, end in self._runs for block in range(start, end))

    @property
    def longest(self) -> int:
        """Length of the longest run."""
        return max((end - start for start, end in self._runs), default=0)

    def fits(self, count: int) -> bool:
        return count <= 0 or self._find(count) is not None

    def take(self, count: int) -> list[int]:
        if count <= 0:
            return []
        found = self._find(count)
        if found is None:
            raise ValueError(f"no run of {count} free blocks")
        place, first, last = found
        start, end = self._runs[place]
        self._runs[place : place + 1] = [
            run for run in ((start, first), (last, end)) if run[0] < run[1]
        ]
        self._count -= last - first
        return list(range(first, last))

    def _find(self, count: int) -> tuple[int, int, int] | None:
        """(place of the run, first block, one past the last) of the first fit."""
        size = power_of_two(count) if self._buddy else count
        for place, (start, end) in enumerate(self._runs):
            # Blocks are numbered from 1, so that is where alignment counts from.
            first = -(-(start - 1) // size) * size + 1 if self._buddy else start
            if first + size <= end:
                return place, first, first + size
        return None

    def remove(self, block: int) -> None:
        raise ValueError(f"block {block}: contiguous layouts have no prefix cache")

    def put(self, unnamed: list[int], named: list[int]) -> None:
        blocks = sorted(unnamed + named)
        self._count += len(blocks)
        first = 0
        for i, block in enumerate(blocks):
            if i + 1 == len(blocks) or blocks[i + 1] != block + 1:
                self._put_run(blocks[first], block + 1)
                first = i + 1

    def _put_run(self, start: int, end: int) -> None:
        """Add a run, joined to its neighbours."""
        runs = self._runs
        place = bisect_left(runs, (start, end))
        after = place
        if place < len(runs) and runs[place][0] == end:
            end = runs[place][1]
            after += 1
        if place > 0 and runs[place - 1][1] == start:
            place -= 1
            start = runs[place][0]
        runs[place:after] = [(start, end)]
