"""Names for the content of KV blocks: what a prefix cache compares.

vLLM hashes the tokens of a block with the hash of the block before it. Here a block is named by
the number of the block before it and the pieces of text it holds, looked up in one table: equal
names mean equal tokens all the way from the start, without ever expanding a token.
"""

from __future__ import annotations

from collections.abc import Iterable

from sim.engine.sequence import Sequence
from sim.request import Segment


class BlockNames:
    """Gives every distinct prefix that ends at a block boundary a number of its own.

    Numbers nobody holds any more are dropped once in a while, so the table stays proportional to
    the cache and the requests in the engine.
    """

    def __init__(self, block_size: int, lookahead: int = 0, sweep_at: int = 1 << 17) -> None:
        """With `lookahead` a name also covers that many tokens after its block, and exists only
        once they are known (the KV of an eagle drafter depends on them)."""
        self._block_size = block_size
        self._span = block_size + lookahead
        self._numbers: dict[tuple[int, ...], int] = {}
        self._roots: dict[tuple[str | None, str | None], int] = {}
        self._last = 0
        self._sweep_at = self._sweep_floor = sweep_at

    def __len__(self) -> int:
        return len(self._numbers)

    def extend(self, seq: Sequence) -> None:
        """Name the blocks of `seq` that known tokens fill and that have no name yet."""
        size, span, names = self._block_size, self._span, seq.block_names
        missing = (seq.num_tokens - span + size) // size - len(names)
        if missing <= 0:
            return
        if not names and not seq.text:
            seq.text = _merged(seq.request.prompt_segments())
        numbers, parent = self._numbers, names[-1] if names else self._root(seq)
        index, offset = seq.name_cursor
        text = seq.text
        for _ in range(missing):
            piece = text[index] if index < len(text) else seq.output_text()
            key: tuple[int, ...]
            if piece.length - offset >= span:
                key = (parent, piece.content, piece.start + offset)
                offset += size
                if offset == piece.length and index < len(text):
                    index, offset = index + 1, 0
            else:
                key = (parent, *_pieces(seq, index, offset, span))
                index, offset = _advance(seq, index, offset, size)
            parent = numbers.get(key, 0)
            if not parent:
                self._last += 1
                parent = numbers[key] = self._last
            names.append(parent)
        seq.name_cursor = (index, offset)

    @property
    def wants_sweep(self) -> bool:
        return len(self._numbers) > self._sweep_at

    def sweep(self, held: Iterable[int]) -> None:
        """Forget the names that are neither `held` nor a prefix of one that is."""
        alive = set(held)
        kept = []
        for key, number in reversed(self._numbers.items()):  # a prefix is older than what follows
            if number in alive:
                alive.add(key[0])
                kept.append((key, number))
        self._numbers = dict(reversed(kept))
        self._sweep_at = max(self._sweep_floor, 2 * len(kept))

    def _root(self, seq: Sequence) -> int:
        """The number that stands before a first block: one for each adapter and cache salt.

        (vLLM puts the adapter into every block and the salt into the first; as names are chained,
        both in front is the same.)
        """
        isolation = (seq.request.lora or None, seq.request.cache_salt or None)
        root = self._roots.get(isolation)
        if root is None:
            self._last += 1
            root = self._roots[isolation] = self._last
        return root


def _merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same text in as few pieces as possible, so that equal texts look equal."""
    merged: list[Segment] = []
    for segment in segments:
        if segment.length == 0:
            continue
        if merged:
            last = merged[-1]
            if segment.content == last.content and segment.start == last.start + last.length:
                merged[-1] = Segment(last.content, last.start, last.length + segment.length)
                continue
        merged.append(segment)
    return tuple(merged)


def _pieces(seq: Sequence, index: int, offset: int, count: int) -> list[int]:
    """`count` tokens from a cursor on, flat: content, start, length of each piece."""
    text = seq.text
    flat: list[int] = []
    while count > 0:
        piece = text[index] if index < len(text) else seq.output_text()
        length = min(count, piece.length - offset)
        flat += (piece.content, piece.start + offset, length)
        count -= length
        index, offset = index + 1, 0
    return flat


def _advance(seq: Sequence, index: int, offset: int, count: int) -> tuple[int, int]:
    """The cursor `count` tokens further on."""
    text = seq.text
    while index < len(text) and offset + count >= text[index].length:
        count -= text[index].length - offset
        index, offset = index + 1, 0
    return index, offset + count
