"""Extents: KV blocks of equal fate, and what is done to them.

An extent covers consecutive cached blocks of one line, held by the same sequences. Sequences that
hold more than one thing in a row hold it by its first extent and a length: when an extent is
split, `rest` leads on.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from sim.engine.fast.lines import Line

by_start = attrgetter("start")


class Extent:
    """Cached blocks `start` to `end` (exclusive) of a line."""

    __slots__ = ("end", "is_twin", "line", "newer", "older", "refs", "rest", "start")

    older: Extent
    """Neighbour towards the front of the free queue: evicted before this one."""
    newer: Extent

    def __init__(self, line: Line, start: int, end: int, refs: int, is_twin: bool) -> None:
        self.line = line
        self.start = start
        self.end = end
        self.refs = refs
        self.is_twin = is_twin
        self.rest: Extent | None = None
        """What was split off its end, for those who hold both."""

    def __repr__(self) -> str:
        twin = " twin" if self.is_twin else ""
        return f"<{self.start}..{self.end} refs {self.refs}{twin}>"

    @property
    def copies(self) -> list[Extent]:
        """The list of its line in which it is."""
        return self.line.twins if self.is_twin else self.line.main

    def split(self, at: int) -> Extent:
        """Cut it in two; the blocks from `at` on become the new one."""
        rest = Extent(self.line, at, self.end, self.refs, self.is_twin)
        self.end = at
        rest.rest = self.rest
        self.rest = rest
        copies = self.copies
        copies.insert(copies.index(self) + 1, rest)
        if not self.refs:  # evicted from the end: the rest goes before
            rest.put_before(self)
        return rest

    def pieces(self, count: int) -> list[Extent]:
        """What `count` blocks from its start have become by splits, itself first."""
        pieces = [self]
        count -= self.end - self.start
        while count > 0:
            rest = pieces[-1].rest
            assert rest is not None
            pieces.append(rest)
            count -= rest.end - rest.start
        return pieces

    # -- the free queue

    def put_before(self, newer: Extent) -> None:
        """Join the free queue, to be evicted just before `newer`."""
        older = newer.older
        self.older, self.newer = older, newer
        older.newer = newer.older = self

    def take_out(self) -> None:
        """Leave the free queue."""
        self.older.newer = self.newer
        self.newer.older = self.older


def promote(line: Line, start: int, end: int) -> None:
    """The first copies of these blocks are gone from `line.main`: the next become the first."""
    gaps = [(start, end)]
    while gaps:
        start, end = gaps.pop()
        for twin in line.twins:
            low, high = max(twin.start, start), min(twin.end, end)
            if low < high:
                if twin.start < low:
                    twin = twin.split(low)
                if twin.end > high:
                    twin.split(high)
                line.twins.remove(twin)
                twin.is_twin = False
                insort(line.main, twin, key=by_start)
                gaps += [gap for gap in ((start, low), (high, end)) if gap[0] < gap[1]]
                break
