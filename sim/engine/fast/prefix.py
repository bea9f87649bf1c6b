"""The prefix cache of the fast engine, on extents instead of blocks.

Which block a sequence gets never changes what happens next; how many are free, what is cached
and what is evicted first does. The results equal those of `sim.engine.kv_cache` (vLLM's rules)
exactly.

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

from sim.engine.fast.blocks import Blocks
from sim.engine.fast.extents import Extent, by_start, promote
from sim.engine.fast.lines import Line, Lines
from sim.engine.fast.sequence import FastSequence

Hit = list[tuple[Extent, int]]
"""A cached prefix: (extent, how many of its leading blocks), in order."""


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
                extent.split(extent.start + count)
            if not extent.refs:
                extent.take_out()
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
                pieces = tuple(reversed(extent.pieces(count)))
            for piece in pieces:
                piece.refs -= 1
                if not piece.refs:
                    freed += piece.end - piece.start
                    piece.rest = None
                    piece.put_before(ring)
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
                extent.take_out()
                copies = extent.copies
                if copies[-1] is extent:
                    copies.pop()
                else:
                    copies.remove(extent)
            end, extent.end = extent.end, start
            line = extent.line
            if line.twins and not extent.is_twin:
                promote(line, start, end)
            elif not (line.main or line.users):
                self.lines.prune(line)

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
                insort(main, self._add(seq, line, at, other.start, False), key=by_start)
                at = other.start
            stop = min(other.end, end)
            line.twins.append(self._add(seq, line, at, stop, is_twin=True))
            at = stop
        if at < end:
            insort(main, self._add(seq, line, at, end, is_twin=False), key=by_start)

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
                pieces = extent.pieces(count)
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
