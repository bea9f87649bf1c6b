"""One step's input as flat tensors: decodes first, sorted by context, then prefill chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

MAX_DECODE_QUERY = 8
"""Entries with at most this many query tokens that sample are computed as decodes."""


@dataclass(frozen=True)
class Entry:
    """One sequence's share of a step."""

    tokens: Sequence[int]
    """Query tokens; drafts to verify at the end."""
    start: int
    """Position of the first one: so many tokens are in the KV cache already."""
    blocks: Sequence[int]
    """Block table; 0 where a token needs no block (it left the sliding window)."""
    num_logits: int
    """Logits wanted, at the last so many tokens; 0 for a chunk that completes nothing."""

    @property
    def end(self) -> int:
        """Context of its last token, itself included."""
        return self.start + len(self.tokens)

    @property
    def is_decode(self) -> bool:
        """Computed by decode attention: few tokens on a context that is there already."""
        return 0 < self.num_logits == len(self.tokens) <= MAX_DECODE_QUERY and self.start > 0


@dataclass(frozen=True)
class Chunk:
    """A prefill chunk of the batch: tokens `first` to `first + length` of it."""

    first: int
    length: int
    prefix: int
    blocks: torch.Tensor
    """[blocks of the context] int64, on the device."""


@dataclass(frozen=True)
class DecodeGroup:
    """Decodes with equally many query tokens and similar contexts, computed together."""

    first: int
    """Its first token in the batch."""
    requests: int
    query: int
    blocks: torch.Tensor
    """[requests * blocks] int64: equally long rows, padded with block 0, flat."""
    hidden: torch.Tensor
    """[requests, 1, query * group, tokens] bool: True where a key may be seen."""


@dataclass(frozen=True)
class Batch:
    """A step for the decoder. Tensors are on the device."""

    token_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64"""
    slots: torch.Tensor
    """[tokens] int64: block * block_size + offset, where keys and values go."""
    logit_rows: torch.Tensor
    """[logits] int64: the tokens whose logits are wanted, in the order of the entries given."""
    entries: tuple[Entry, ...]
    """In the order given by the caller."""
    order: tuple[int, ...]
    """Entries in batch order; the first `num_decodes` are decodes."""
    num_decodes: int
    num_decode_tokens: int

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def decodes(self) -> list[Entry]:
        return [self.entries[i] for i in self.order[: self.num_decodes]]

    @property
    def prefills(self) -> list[Entry]:
        return [self.entries[i] for i in self.order[self.num_decodes :]]


def make_batch(entries: Sequence[Entry], block_size: int, device: torch.device) -> Batch:
    """Flatten the entries of a step. Positions beyond a block table write to block 0 (nobody
    reads them: drafts past the longest context)."""
    decodes = [i for i, e in enumerate(entries) if e.is_decode]
    decodes.sort(key=lambda i: (len(entries[i].tokens), entries[i].end))
    order = decodes + [i for i, e in enumerate(entries) if not e.is_decode]
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    first = [0] * len(entries)
    for i in order:
        entry = entries[i]
        first[i] = len(ids)
        ids.extend(entry.tokens)
        positions.extend(range(entry.start, entry.end))
        slots.extend(_slots(entry, block_size))
    rows: list[int] = []
    for i, entry in enumerate(entries):
        last = first[i] + len(entry.tokens)
        rows.extend(range(last - entry.num_logits, last))
    packed = torch.tensor([ids, positions, slots], dtype=torch.int64).to(device, non_blocking=True)
    return Batch(
        token_ids=packed[0],
        positions=packed[1],
        slots=packed[2],
        logit_rows=torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
        entries=tuple(entries),
        order=tuple(order),
        num_decodes=len(decodes),
        num_decode_tokens=sum(len(entries[i].tokens) for i in decodes),
    )


def _slots(entry: Entry, block_size: int) -> list[int]:
    blocks, limit = entry.blocks, len(entry.blocks) * block_size
    if len(entry.tokens) > 32:
        at = np.arange(entry.start, min(entry.end, limit))
        found: list[int] = (
            np.asarray(blocks)[at // block_size] * block_size + at % block_size
        ).tolist()
        return found + [0] * (len(entry.tokens) - len(found))
    return [
        blocks[p // block_size] * block_size + p % block_size if p < limit else 0
        for p in range(entry.start, entry.end)
    ]
