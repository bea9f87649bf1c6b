"""KV blocks counted, not named: the block pool and prefix cache of the fast engine.

Which block a sequence gets never changes what happens next; how many are free, what is cached
and what is evicted first does. So blocks of equal fate form an *extent*, and all the cache does,
it does to extents. The results equal those of `sim.engine.kv_cache` (vLLM's rules) exactly.

Invariants (`check_integrity`):

1. An extent covers consecutive blocks of one line, all cached, all held by the same sequences.
2. `refs` of an extent is the number of sequences that hold it; it is in the free queue exactly
   when `refs` is 0. Read from its last block to its first, the queue is vLLM's free queue without
   its blank blocks, which all come before.
3. `Line.main` is sorted and without overlap; a twin lies within blocks that `main` covers.
4. A sequence holds whole extents: its `extents[i]`, and what was split off from it, for
   `lengths[i]` blocks.
5. Blank free blocks + blocks in the queue + blocks held, each once = all blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from sim.engine.fast.lines import Line, Lines
from sim.engine.fast.sequence import FastSequence

_by_start = attrgetter("start")


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


Hit = list[tuple[Extent, int]]
"""A cached prefix: (extent, how many of its leading blocks), in order."""


class Blocks:
    """A pool without prefix cache: a counter."""

    caching = False

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = num_blocks

    def take(self, count: int) -> None:
        """Allocate; `count` is at most `free`."""
        self.free -= count

    def release(self, seq: FastSequence) -> None:
        """Free the `held` blocks of a sequence."""
        self.free += seq.held
        seq.held = 0

    def check_integrity(self, sequences: Iterable[FastSequence]) -> None:
        """Raise AssertionError unless the books agree with the `held` of all sequences."""
        assert self.free + sum(seq.held for seq in sequences) == self.num_blocks, "blocks lost"


class PrefixBlocks(Blocks):
    """A pool with a prefix cache.

    Blocks that sequences fill by decoding are registered late, when someone could tell the
    difference; `progress(seq)` says how many tokens of a sequence would be registered by now.
    """

    caching = True

    def __init__(
        self, num_blocks: int, block_size: int, progress: Callable[[FastSequence], int]
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.blank = num_blocks
        """Free blocks without cached content."""
        self.lines = Lines(block_size)
        self._progress = progress
        # The free queue is a ring; the sentinel lies between its back and its front.
        sentinel = Extent(Line(None, (0, -1, 0), None), 0, 0, -1, False)
        sentinel.older = sentinel.newer = sentinel
        self._ring = sentinel

    # -- sequences look, come and go

    def enter(self, seq: FastSequence) -> None:
        """A sequence wants to be looked up for the first time."""
        seq.extents, seq.lengths = [], []
        seq.tail = None
        seq.held = seq.registered = 0
        seq.path = self.lines.enter(seq)

    def leave(self, seq: FastSequence) -> None:
        """A sequence will not come back. It holds no blocks."""
        if seq.path is not None:
            self.lines.leave(seq)

    def watches(self, seq: FastSequence) -> bool:
        """Whether a running sequence may yet register blocks that `seq` would hit."""
        assert seq.path is not None
        return any(
            other is not seq and other.held and end > other.registered
            for line, end in seq.path
            for other in line.writers
        )

    def find_hit(self, seq: FastSequence, known: int) -> Hit:
        """The longest cached prefix of `known` tokens that leaves one to compute."""
        hit: Hit = []
        if seq.path is None:
            self.enter(seq)
        assert seq.path is not None
        most = (known - 1) // self.block_size
        at = 0
        for line, end in seq.path:
            stop = end if end < most else most
            if line.writers and (len(line.writers) > 1 or line.writers[0] is not seq):
                self._catch_up(line, stop, seq)
            for extent in line.main:
                if extent.start != at or at >= stop:
                    break
                if extent.end >= stop:
                    hit.append((extent, stop - at))
                    at = stop
                else:
                    hit.append((extent, extent.end - at))
                    at = extent.end
            if at < end:
                break
        return hit

    def acquire(self, seq: FastSequence, hit: Hit) -> None:
        """Hold the blocks of a hit just found."""
        for extent, count in hit:
            if extent.end - extent.start != count:
                self._split(extent, extent.start + count)
            if not extent.refs:
                extent.older.newer = extent.newer
                extent.newer.older = extent.older
                self.free -= count
            extent.refs += 1
            seq.extents.append(extent)
            seq.lengths.append(count)
            seq.registered += count
        seq.tail = None

    def release(self, seq: FastSequence) -> None:
        """Free the `held` blocks of a sequence, the last first. It is registered up to date."""
        freed = seq.held - seq.registered
        self.blank += freed
        ring = self._ring
        for extent, count in zip(reversed(seq.extents), reversed(seq.lengths), strict=True):
            pieces: tuple[Extent, ...] = (extent,)
            if extent.end - extent.start != count:
                pieces = tuple(reversed(_pieces(extent, count)))
            for piece in pieces:
                piece.refs -= 1
                if not piece.refs:
                    freed += piece.end - piece.start
                    piece.rest = None
                    piece.newer = ring
                    piece.older = newest = ring.older
                    newest.newer = ring.older = piece
        self.free += freed
        seq.held = seq.registered = 0
        seq.extents, seq.lengths, seq.tail = [], [], None

    # -- allocation and eviction

    def take(self, count: int) -> None:
        self.free -= count
        if count <= self.blank:
            self.blank -= count
            return
        count -= self.blank
        self.blank = 0
        first = self._ring.newer
        if first.end - first.start > count and not first.line.twins:
            first.end -= count
            return
        while count:
            extent = self._ring.newer
            start = extent.end - count
            if start > extent.start:
                count = 0
            else:
                start = extent.start
                count -= extent.end - start
                extent.newer.older = self._ring
                self._ring.newer = extent.newer
                line = extent.line
                copies = line.twins if extent.is_twin else line.main
                if copies[-1] is extent:
                    copies.pop()
                else:
                    copies.remove(extent)
            end, extent.end = extent.end, start
            if extent.line.twins and not extent.is_twin:
                self._promote(extent.line, start, end)
            elif start == extent.start and not (line.main or line.users):
                self.lines.prune(line)

    def _promote(self, line: Line, start: int, end: int) -> None:
        """The first copies of these blocks are gone: the next copies come first now."""
        gaps = [(start, end)]
        while gaps:
            start, end = gaps.pop()
            for twin in line.twins:
                low, high = max(twin.start, start), min(twin.end, end)
                if low < high:
                    if twin.start < low:
                        twin = self._split(twin, low)
                    if twin.end > high:
                        self._split(twin, high)
                    line.twins.remove(twin)
                    twin.is_twin = False
                    insort(line.main, twin, key=_by_start)
                    gaps += [gap for gap in ((start, low), (high, end)) if gap[0] < gap[1]]
                    break

    def _split(self, extent: Extent, at: int) -> Extent:
        """Cut an extent in two; the blocks from `at` on become the new one."""
        rest = Extent(extent.line, at, extent.end, extent.refs, extent.is_twin)
        extent.end = at
        rest.rest = extent.rest
        extent.rest = rest
        copies = extent.line.twins if extent.is_twin else extent.line.main
        copies.insert(copies.index(extent) + 1, rest)
        if not extent.refs:  # evicted from the end: the rest goes before
            older = extent.older
            rest.older, rest.newer = older, extent
            older.newer = extent.older = rest
        return rest

    # -- registration

    def register(self, seq: FastSequence, num_tokens: int, alone: bool = False) -> None:
        """The blocks that the first `num_tokens` tokens of a running sequence fill are cached.
        `alone`: nobody else has to be caught up with first."""
        full = num_tokens // self.block_size
        at = seq.registered
        if full <= at:
            return
        assert seq.path is not None
        for line, end in seq.path:
            if end > at:
                stop = end if end < full else full
                writers = line.writers
                if not alone and writers and (len(writers) > 1 or writers[0] is not seq):
                    self._catch_up(line, stop, seq)
                self._enter_blocks(seq, line, at, stop)
                if stop == full:
                    break
                at = stop
        seq.registered = full

    def _enter_blocks(self, seq: FastSequence, line: Line, start: int, end: int) -> None:
        main, tail = line.main, seq.tail
        if not main or main[-1].end <= start:
            if main and main[-1] is tail and tail.end == start and tail.refs == 1:
                tail.end = end
                seq.lengths[-1] += end - start
            else:
                main.append(self._add(seq, line, start, end, is_twin=False))
            return
        # Someone has cached equal blocks already.
        at = start
        for other in list(main):
            if other.end <= at:
                continue
            if other.start >= end:
                break
            if other.start > at:
                insort(main, self._add(seq, line, at, other.start, False), key=_by_start)
                at = other.start
            stop = min(other.end, end)
            line.twins.append(self._add(seq, line, at, stop, is_twin=True))
            at = stop
        if at < end:
            insort(main, self._add(seq, line, at, end, is_twin=False), key=_by_start)

    def _add(self, seq: FastSequence, line: Line, start: int, end: int, is_twin: bool) -> Extent:
        extent = Extent(line, start, end, 1, is_twin)
        seq.extents.append(extent)
        seq.lengths.append(end - start)
        seq.tail = extent
        return extent

    def _catch_up(self, line: Line, end: int, seq: FastSequence) -> None:
        """Register what other sequences have decoded on a line up to block `end`, before `seq`
        looks or writes there."""
        behind = [w for w in line.writers if w.held and w.registered < end and w is not seq]
        for writer in behind:
            # What two sequences decode is never the same text, so their order is of no interest.
            self.register(writer, self._progress(writer), alone=True)

    # -- audit

    def check_integrity(self, sequences: Iterable[FastSequence]) -> None:
        """Raise AssertionError unless the invariants above hold; `sequences` are all there are."""
        sequences = list(sequences)
        refs: dict[Extent, int] = {}
        for seq in sequences:
            blocks = 0
            for extent, count in zip(seq.extents, seq.lengths, strict=True):
                pieces = _pieces(extent, count)
                assert sum(p.end - p.start for p in pieces) == count, f"{seq}: part of an extent"
                blocks += count
                for piece in pieces:
                    refs[piece] = refs.get(piece, 0) + 1
            assert blocks == seq.registered <= seq.held, f"{seq}: registered blocks"
        queue = set()
        extent = self._ring.newer
        while extent is not self._ring:
            assert extent.newer.older is extent, "the free queue is torn"
            queue.add(extent)
            extent = extent.newer
        listed: set[Extent] = set()
        for line in self.lines.walk():
            at = line.start
            for extent in line.main:
                assert at <= extent.start < extent.end, f"{extent}: order"
                assert not extent.is_twin, f"{extent} leads"
                at = extent.end
            covered = {p for e in line.main for p in range(e.start, e.end)}
            for extent in line.twins:
                assert extent.is_twin, f"{extent} follows"
                assert covered >= set(range(extent.start, extent.end)), f"{extent} is alone"
            listed.update(line.main, line.twins)
        assert listed == queue | refs.keys(), "extents lost"
        for extent in listed:
            assert extent.refs == refs.get(extent, 0), f"{extent}: {refs.get(extent, 0)} hold it"
            assert (extent in queue) == (extent.refs == 0), f"{extent}: free or held"
        cached = sum(e.end - e.start for e in queue)
        assert self.free == self.blank + cached, "free blocks"
        held = sum(e.end - e.start for e in refs) + sum(s.held - s.registered for s in sequences)
        assert self.free + held == self.num_blocks, "blocks lost"


def _pieces(extent: Extent, count: int) -> list[Extent]:
    """The extents that `count` blocks from the start of `extent` have become by splits."""
    pieces = [extent]
    count -= extent.end - extent.start
    while count > 0:
        rest = extent.rest
        assert rest is not None
        pieces.append(rest)
        count -= rest.end - rest.start
        extent = rest
    return pieces
