"""The decoding requests of a replica, as sums.

Every member gets one token in every step, so a step changes nothing but a common counter: a
member's context in row `r` of the step log is `offset + r`. What a step costs (how many members,
the sum and the sum of squares of their contexts), how many KV blocks it needs (members whose
context enters a new block: as many as there are offsets of one residue) and who gets the last
token when (a heap of rows) come from counts that are kept up to date, not from lists.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING

from sim.engine.fast.sequence import DECODE, DRAINING, FastSequence

if TYPE_CHECKING:
    from sim.engine.fast.blocks import Blocks


class Cohort:
    """Members, and what the next row looks like.

    Invariants: `row` is planned next; `size`, `context` and `context_sq` are the number of
    members and the sums of `offset + row` and its square; `entering[k]` counts the
    members with `(offset - 1) % block_size == k`; every member and every draining sequence has
    exactly one valid entry in the heap, or has been handed out by `pop_last_tokens`.
    """

    __slots__ = ("block_size", "context", "context_sq", "entering", "last_rows", "row", "size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.row = 0
        self.size = 0
        self.context = 0
        self.context_sq = 0
        self.entering = [0] * block_size
        self.last_rows: list[tuple[int, int, FastSequence]] = []
        """Heap of (row of the last token, admission, sequence); some entries are out of date."""

    def add(self, seq: FastSequence) -> None:
        """`seq` decodes from `row` on."""
        seq.stage = DECODE
        context = seq.offset + self.row
        self.size += 1
        self.context += context
        self.context_sq += context * context
        self.entering[(seq.offset - 1) % self.block_size] += 1

    def remove(self, seq: FastSequence) -> None:
        """`seq` does not decode in `row` any more."""
        context = seq.offset + self.row
        self.size -= 1
        self.context -= context
        self.context_sq -= context * context
        self.entering[(seq.offset - 1) % self.block_size] -= 1

    def advance(self, rows: int) -> None:
        """The next `rows` rows have been planned, with all members."""
        self.row += rows
        grown = rows * self.size
        self.context_sq += rows * (2 * self.context + grown)
        self.context += grown

    def demand(self, row: int) -> int:
        """Blocks that `row`, now or later, takes from these members."""
        return self.entering[-row % self.block_size]

    def usage(self, count: int, blocks: Blocks) -> list[int]:
        """Blocks in use after each of the next `count` rows, as far as blocks suffice."""
        entering, at = self.entering, -self.row % self.block_size
        demand = entering[at::-1] + entering[:at:-1]  # of this row, the next, ...
        if count > self.block_size:
            demand *= count // self.block_size + 1
        all_blocks = blocks.num_blocks
        used = list(accumulate(demand[:count], initial=all_blocks - blocks.free))
        del used[0]
        if used and used[-1] > all_blocks:
            del used[bisect_right(used, all_blocks) :]
        return used

    # -- last tokens

    def expect(self, seq: FastSequence) -> None:
        """`seq` gets its last token in `seq.last_row`."""
        heappush(self.last_rows, (seq.last_row, seq.admission, seq))

    def first_last_row(self) -> int | None:
        """The next row in which somebody gets the last token."""
        heap = self.last_rows
        while heap:
            row, admission, seq = heap[0]
            if row == seq.last_row and admission == seq.admission and seq.stage in _EXPECTED:
                return row
            heappop(heap)
        return None

    def pop_last_tokens(self, row: int) -> list[FastSequence]:
        """Take out those whose last token is in `row` or before, in that order and then in order
        of admission."""
        heap = self.last_rows
        popped = []
        while heap and heap[0][0] <= row:
            last_row, admission, seq = heappop(heap)
            if last_row == seq.last_row and admission == seq.admission and seq.stage in _EXPECTED:
                popped.append(seq)
        return popped

    def check_integrity(self, members: Iterable[FastSequence]) -> None:
        """Raise AssertionError unless the sums are those of `members`."""
        contexts = [seq.offset + self.row for seq in members]
        assert self.size == len(contexts), "size"
        assert self.context == sum(contexts), "contexts"
        assert self.context_sq == sum(c * c for c in contexts), "squares of contexts"
        entering = [0] * self.block_size
        for context in contexts:
            entering[(context - self.row - 1) % self.block_size] += 1
        assert entering == self.entering, "block demand"


_EXPECTED = (DECODE, DRAINING)
