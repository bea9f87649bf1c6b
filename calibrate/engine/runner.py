"""Executes the scheduler's plans: tokens in, tokens out. It decides nothing about scheduling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from calibrate.engine.batch import Entry, make_batch
from calibrate.engine.decoder import Model
from calibrate.engine.ops import NoRecorder, Recorder
from calibrate.engine.sampling import GREEDY, Draws, SamplingParams, probabilities, sample, verify
from calibrate.engine.speculation import Context, Drafts, Proposer
from calibrate.engine.stops import Detokenize, StopChecker
from calibrate.engine.tokens import TokenSource
from sim.engine.plan import StepPlan
from sim.engine.sequence import Sequence


@dataclass
class Text:
    """The tokens of one sequence, and how it is decoded."""

    known: list[int]
    num_prompt: int
    draws: Draws
    stops: StopChecker
    drafts: Drafts = field(default_factory=lambda: Drafts([]))
    """Proposed after its last step."""
    end: int | None = None
    """Output tokens at which it ended by itself."""
    why: str = ""

    @property
    def output(self) -> list[int]:
        return self.known[self.num_prompt :]


@dataclass
class StepTokens:
    """What a step produced, per entry of its plan."""

    new: list[list[int]]
    """Tokens: accepted drafts and one more; none for entries that do not sample."""
    num_drafts: list[int]
    """Drafts proposed for the next step."""
    ended: dict[Sequence, int] = field(default_factory=dict)
    """Sequences that reached EOS or a stop, and how many output tokens that makes."""


class ModelRunner:
    """A decoder, the texts of the sequences it serves, and what proposes drafts.

    `params_of` gives the sampling parameters of a sequence; without it all are greedy and end by
    length only. Call `forget` with sequences that have left.
    """

    def __init__(
        self,
        decoder: Model,
        tokens: TokenSource,
        *,
        params_of: Callable[[Sequence], SamplingParams] | None = None,
        eos: tuple[int, ...] = (),
        detokenize: Detokenize | None = None,
        proposer: Proposer | None = None,
        num_drafts: int = 0,
    ) -> None:
        self.decoder = decoder
        self.tokens = tokens
        self.proposer = proposer
        self.num_drafts = num_drafts
        self._params_of = params_of or (lambda _: GREEDY)
        self._eos = eos if params_of is not None else ()
        self._detokenize = detokenize
        self.texts: dict[Sequence, Text] = {}

    def text(self, seq: Sequence) -> Text:
        """The sequence's tokens so far."""
        text = self.texts.get(seq)
        if text is None:
            params = self._params_of(seq)
            stops = StopChecker(params, self._eos, self._detokenize)
            known = self.tokens.prompt(seq.request)
            draws = Draws(params, seq.request.uid)
            text = self.texts[seq] = Text(known, len(known), draws, stops)
        return text

    def forget(self, seq: Sequence) -> None:
        self.texts.pop(seq, None)

    def forget_finished(self) -> None:
        for seq in [s for s in self.texts if s.finished]:
            del self.texts[seq]

    @torch.inference_mode()
    def run(self, plan: StepPlan, recorder: Recorder | None = None) -> StepTokens:
        """Compute one step. Marks `prepare`, the decoder's operators, `sample` and `propose`."""
        recorder = recorder or NoRecorder()
        texts = [self.text(seq) for seq in plan.seqs]
        entries = [self._entry(plan, i, text) for i, text in enumerate(texts)]
        decoder = self.decoder
        batch = make_batch(entries, decoder.block_size, decoder.weights.device)
        where = decoder.plan(batch)
        recorder.mark("prepare")
        logits = decoder.forward(batch, where, recorder)
        new = self._sample(plan, texts, entries, logits)
        result = StepTokens([self._append(t, n) for t, n in zip(texts, new, strict=True)], [])
        for seq, text in zip(plan.seqs, texts, strict=True):
            if text.end is not None:
                result.ended[seq] = text.end
        recorder.mark("sample")
        result.num_drafts = self._propose(plan, texts, entries)
        if self.proposer is not None:
            recorder.mark("propose")
        return result

    def _entry(self, plan: StepPlan, i: int, text: Text) -> Entry:
        seq, num_tokens = plan.seqs[i], plan.num_tokens[i]
        # With asynchronous speculation the plan counts drafts as computed that were rejected since.
        start = min(plan.num_computed[i], len(text.known) - 1)
        if not plan.samples[i]:
            return Entry(text.known[start : start + num_tokens], start, seq.blocks, 0)
        drafts = plan.drafts.get(seq, 0)
        given = [] if seq in plan.padded else text.drafts.tokens[:drafts]
        filler = [0] * (drafts - len(given))
        return Entry([*text.known[start:], *given, *filler], start, seq.blocks, 1 + drafts)

    def _sample(
        self, plan: StepPlan, texts: list[Text], entries: list[Entry], logits: torch.Tensor
    ) -> list[list[int]]:
        """New tokens of each entry."""
        new: list[list[int]] = [[] for _ in entries]
        rows: list[int] = []
        plain: list[int] = []
        at = 0
        for i, entry in enumerate(entries):
            text, seq = texts[i], plan.seqs[i]
            if entry.num_logits:
                count = plan.drafts.get(seq, 0)
                drafts = [] if seq in plan.padded else text.drafts.tokens[:count]
                if drafts:
                    target = probabilities(logits[at : at + len(drafts) + 1], text.draws.params)
                    new[i] = verify(target, drafts, text.drafts.probs, text.draws)
                else:
                    plain.append(i)
                    rows.append(at)
            at += entry.num_logits
        if plain:
            chosen = logits if len(rows) == len(logits) else logits[rows]
            tokens = sample(chosen, [texts[i].draws for i in plain])
            for i, token in zip(plain, tokens, strict=True):
                new[i] = [token]
        for i, seq in enumerate(plan.seqs):
            done = len(texts[i].known) - texts[i].num_prompt
            for j in range(len(new[i])):
                given = self.tokens.output(seq.request, done + j)
                if given is not None:
                    new[i][j] = given
        return new

    def _append(self, text: Text, new: list[int]) -> list[int]:
        """Add new tokens to a text, up to where it ends. A text that has ended takes no more
        (steps in flight go on for a while)."""
        if text.end is not None:
            return new
        text.known.extend(new)
        if new:
            found = text.stops.first_end(text.output, len(new)) if text.stops.active else None
            if found is not None:
                text.end, text.why = found
                del text.known[text.num_prompt + text.end :]
        return new

    def _propose(self, plan: StepPlan, texts: list[Text], entries: list[Entry]) -> list[int]:
        if self.proposer is None:
            return [0] * len(entries)
        contexts = [
            Context(
                known=text.known,
                start=entry.start,
                end=len(text.known) if entry.num_logits else entry.end,
                blocks=entry.blocks,
                wants_drafts=entry.num_logits > 0 and text.end is None,
                params=text.draws.params,
                draws=text.draws,
            )
            for entry, text in zip(entries, texts, strict=True)
        ]
        proposed = self.proposer.propose(contexts, self.num_drafts)
        for text, drafts in zip(texts, proposed, strict=True):
            text.drafts = drafts
        return [len(drafts.tokens) for drafts in proposed]
