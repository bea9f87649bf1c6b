"""Where draft tokens come from: the text itself, or a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from calibrate.engine.batch import Entry, make_batch
from calibrate.engine.decoder import Model
from calibrate.engine.sampling import Draws, SamplingParams, choose, probabilities


@dataclass(frozen=True)
class Drafts:
    """Tokens proposed for one sequence; `probs` [tokens, vocab] is what they were sampled from,
    None when they were certain."""

    tokens: list[int]
    probs: torch.Tensor | None = None


@dataclass(frozen=True)
class Context:
    """One sequence of the step that has just run, as a proposer sees it."""

    known: Sequence[int]
    """All its tokens, the newest sampled one included."""
    start: int
    """Position of the first query token of the step."""
    end: int
    """Position after the last token whose KV the draft model must have: all known ones, or those
    of the chunk when the step did not complete the prompt."""
    blocks: Sequence[int]
    wants_drafts: bool
    params: SamplingParams
    draws: Draws


class Proposer(Protocol):
    """Proposes up to `count` tokens for each sequence after a step."""

    def propose(self, contexts: Sequence[Context], count: int) -> list[Drafts]:
        """Parallel to `contexts`; no tokens where none are wanted or found."""
        ...


class NgramProposer:
    """Prompt lookup (Saxena 2023): what followed the last few tokens when they came before."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.longest, self.shortest = longest, shortest

    def propose(self, contexts: Sequence[Context], count: int) -> list[Drafts]:
        return [Drafts(self.lookup(c.known, count) if c.wants_drafts else []) for c in contexts]

    def lookup(self, known: Sequence[int], count: int) -> list[int]:
        """The tokens after the first earlier occurrence of the longest suffix that has one."""
        text = list(known)
        for length in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            suffix = text[-length:]
            for at in range(len(text) - length):
                if text[at : at + length] == suffix:
                    return text[at + length : at + length + count]
        return []


class DraftModel:
    """A smaller decoder with a KV cache of its own in the same blocks as the target's."""

    def __init__(self, decoder: Model) -> None:
        self.decoder = decoder

    def propose(self, contexts: Sequence[Context], count: int) -> list[Drafts]:
        """First the tokens the target has just computed (and the new one), then one at a time."""
        entries = [
            Entry(c.known[c.start : c.end], c.start, c.blocks, int(c.wants_drafts))
            for c in contexts
        ]
        drafting = [c for c in contexts if c.wants_drafts]
        chosen: list[list[int]] = [[] for _ in drafting]
        probs: list[list[torch.Tensor]] = [[] for _ in drafting]
        for step in range(count):
            logits = self._logits(entries)
            for i, c in enumerate(drafting):
                distribution = probabilities(logits[i : i + 1], c.params)[0]
                chosen[i].append(choose(distribution, c.draws))
                probs[i].append(distribution)
            if not drafting:
                break
            entries = [
                Entry(chosen[i][-1:], c.end + step, c.blocks, 1) for i, c in enumerate(drafting)
            ]
        found = iter(zip(chosen, probs, strict=True))
        result: list[Drafts] = []
        for c in contexts:
            tokens, each = next(found) if c.wants_drafts else ([], [])
            result.append(Drafts(tokens, torch.stack(each) if each else None))
        return result

    def _logits(self, entries: Sequence[Entry]) -> torch.Tensor:
        decoder = self.decoder
        batch = make_batch(entries, decoder.block_size, decoder.weights.device)
        return decoder.forward(batch, decoder.plan(batch))
