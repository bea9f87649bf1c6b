"""The shared content of many prompts, in columns; tuples of Segment are made when asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from sim.request import Segment, prompt_key

Ints = npt.NDArray[np.int64]


class SegmentTable(Sequence[tuple[Segment, ...]]):
    """For every row the runs of shared text its prompt begins with; the rest is private.

    Row `i` has the runs `offsets[i]:offsets[i+1]` of `content`, `start` and `length` (int64). What
    they leave of `prompt_tokens[i]` is the private text `prompt_key(i)`, so a row taken to another
    place keeps a private text of its own.
    """

    def __init__(
        self, prompt_tokens: Ints, offsets: Ints, content: Ints, start: Ints, length: Ints
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.offsets = offsets
        self.content = content
        self.start = start
        self.length = length

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @overload
    def __getitem__(self, index: int) -> tuple[Segment, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Segment, ...]]: ...
    def __getitem__(
        self, index: int | slice
    ) -> tuple[Segment, ...] | Sequence[tuple[Segment, ...]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        runs = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        lengths = self.length[runs].tolist()
        shared = map(Segment, self.content[runs].tolist(), self.start[runs].tolist(), lengths)
        rest = int(self.prompt_tokens[row]) - sum(lengths)
        if rest:
            return (*shared, Segment(prompt_key(row), 0, rest))
        return tuple(shared)

    def __iter__(self) -> Iterator[tuple[Segment, ...]]:
        return (self[i] for i in range(len(self)))

    def take(self, rows: Ints) -> SegmentTable:
        """The table of these rows, in this order."""
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        runs = np.repeat(self.offsets[rows] - offsets[:-1], counts) + np.arange(offsets[-1])
        columns = (self.content[runs], self.start[runs], self.length[runs])
        return SegmentTable(self.prompt_tokens[rows], offsets, *columns)


def from_prefixes(prompt_tokens: Ints, content: Ints, length: Ints) -> SegmentTable:
    """Prompts that begin with the first `length[i]` (maybe 0) tokens of the text `content[i]`."""
    has = length > 0
    offsets = np.concatenate(([0], np.cumsum(has)))
    start = np.zeros(int(offsets[-1]), dtype=np.int64)
    return SegmentTable(prompt_tokens, offsets, content[has], start, length[has])


def from_hash_ids(
    prompt_tokens: Ints, hash_ids: Iterable[Sequence[int]], block_tokens: int
) -> SegmentTable:
    """Prompts given as ids of blocks of `block_tokens` tokens, the last one maybe partial.

    Equal ids are equal tokens. All blocks are pieces of one text, content 0: block `h` is its
    tokens from `h * block_tokens` on. Consecutive ids then make one segment, which for Mooncake's
    numbering (in order of first appearance) is 3 segments a prompt instead of 24. Ids too large to
    be positions are first numbered in that order.
    """
    rows = list(hash_ids)
    counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    first = np.concatenate(([0], np.cumsum(counts)))
    ids = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64, count=int(first[-1]))
    if len(ids) and int(ids.max()) >= 2**40:
        ids = _by_appearance(ids)
    # a run begins with each row and wherever an id does not follow the one before it
    begins = np.ones(len(ids), dtype=np.bool_)
    begins[1:] = ids[1:] != ids[:-1] + 1
    begins[first[:-1][counts > 0]] = True
    runs = np.flatnonzero(begins)
    offsets = np.searchsorted(runs, first)
    length = np.diff(np.append(runs, len(ids))) * block_tokens
    short = np.maximum(counts * block_tokens - prompt_tokens, 0)
    last = offsets[1:][counts > 0] - 1
    length[last] -= short[counts > 0]
    content = np.zeros(len(runs), dtype=np.int64)
    return SegmentTable(prompt_tokens, offsets, content, ids[runs] * block_tokens, length)


def _by_appearance(ids: Ints) -> Ints:
    _, first, place = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[place]
