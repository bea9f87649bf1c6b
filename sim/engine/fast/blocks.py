"""KV blocks as a number: which block a sequence gets never changes what happens next."""

from __future__ import annotations

from collections.abc import Iterable

from sim.engine.fast.sequence import FastSequence


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
