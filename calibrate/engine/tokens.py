"""From the simulator's named content to token ids, and back to what a text is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sim.request import Request, Segment, output_key


class TokenSource(Protocol):
    """Token ids of requests. Equal `(content, position)` must give equal ids."""

    def prompt(self, request: Request) -> list[int]:
        """The prompt, `prompt_tokens` long."""
        ...

    def output(self, request: Request, index: int) -> int | None:
        """The token that follows as output number `index`; None: the one that was sampled."""
        ...


class TraceTokens:
    """Tokens of a trace, which has lengths but no text: a hash of content and position.

    Outputs are given as well (the sampled token is thrown away): random weights would soon repeat
    themselves, which no text does, and a trace's later prompts may quote an earlier output.
    """

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.vocab = vocab
        self.seed = seed

    def prompt(self, request: Request) -> list[int]:
        ids: list[int] = []
        for segment in request.prompt_segments():
            ids.extend(self._ids(segment))
        return ids

    def output(self, request: Request, index: int) -> int | None:
        return self._ids(Segment(output_key(request.uid), index, 1))[0]

    def _ids(self, segment: Segment) -> list[int]:
        """splitmix64 of content and position, modulo the vocabulary."""
        key = segment.content * 0x9E3779B97F4A7C15 + self.seed * 0xD1342543DE82EF95
        x = np.arange(segment.start, segment.start + segment.length, dtype=np.uint64)
        x += np.uint64(key % (1 << 64))
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        ids: list[int] = (x % np.uint64(self.vocab)).astype(np.int64).tolist()
        return ids


class TextTokens:
    """Real prompts: the content of every token is its id, so equal texts share their prefix."""

    def prompt(self, request: Request) -> list[int]:
        return [s.content for s in request.prompt_segments() for _ in range(s.length)]

    def output(self, request: Request, index: int) -> int | None:
        return None


def text_segments(ids: Sequence[int]) -> tuple[Segment, ...]:
    """The prompt of a request for `TextTokens`."""
    return tuple(Segment(token, 0, 1) for token in ids)
