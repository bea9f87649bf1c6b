"""Choosing tokens from logits: greedy, temperature, top-k, top-p, and verifying drafts.

Random choices invert the cumulative distribution at one number per draw, taken from the request's
own stream. So a request's tokens do not depend on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sim.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded, and when it ends.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 do not restrict. `stop` are strings (they
    need a `detokenize` function of the engine), `stop_token_ids` end the text as EOS does.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be at least 0, got {self.temperature!r}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {self.max_tokens!r}")
        if "" in self.stop:
            raise UserError("a stop string must not be empty")


GREEDY = SamplingParams()


@dataclass
class Draws:
    """The stream of random numbers of one request."""

    params: SamplingParams
    uid: int
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng((self.params.seed, self.uid))

    def next(self) -> float:
        return float(self._rng.random())


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that `params` samples from: [rows, vocab] fp32. Temperature, then top-k,
    then top-p of what is left (the smallest set that reaches it); one-hot when greedy."""
    if params.temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros(logits.shape, device=logits.device).scatter_(-1, best, 1.0)
    scaled = logits.float() / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        least = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probs = scaled.softmax(dim=-1)
    if params.top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= params.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, index, ordered)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def pick(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The tokens at which the cumulative distributions of `probs` [rows, vocab] pass `u` [rows],
    numbers in [0, 1): [rows] int64. The rows need not sum to 1."""
    total = probs.double().cumsum(dim=-1)
    at = torch.searchsorted(total, (u * total[:, -1])[:, None], right=True)[:, 0]
    # Rounding may put u at the very end, behind the last token that has a probability.
    last = (total < total[:, -1:]).sum(dim=-1)
    return torch.minimum(at, last)


def verify(
    target: torch.Tensor, drafts: list[int], proposal: torch.Tensor | None, draws: Draws
) -> list[int]:
    """Modified rejection sampling (Leviathan et al. 2023; Chen et al. 2023): accepted drafts and
    one more token, distributed exactly as sampling from the target one by one.

    `target` [drafts + 1, vocab] are the target's distributions after each accepted prefix,
    `proposal` [drafts, vocab] those the drafts were sampled from; None: each draft was certain.
    """
    kept: list[int] = []
    for i, draft in enumerate(drafts):
        p = target[i]
        q = 1.0 if proposal is None else float(proposal[i, draft])
        # Greedy needs no draw: p is 0 or 1 there.
        certain = float(p[draft])
        if certain >= q or draws.next() * q < certain:
            kept.append(draft)
            continue
        if proposal is None:
            rest = p.clone()
            rest[draft] = 0.0
        else:
            rest = (p - proposal[i]).clamp_(min=0.0)
        return [*kept, choose(rest, draws)]
    return [*kept, choose(target[len(drafts)], draws)]


def choose(probs: torch.Tensor, draws: Draws) -> int:
    """One token from `probs` [vocab] (any positive sum), without a draw when greedy."""
    if draws.params.temperature == 0:
        return int(probs.argmax())
    u = torch.tensor([draws.next()], dtype=torch.float64, device=probs.device)
    return int(pick(probs[None], u))


def sample(logits: torch.Tensor, draws: Sequence[Draws]) -> list[int]:
    """One token for each row of `logits` [rows, vocab]; rows decoded alike are handled at once."""
    if all(d.params.temperature == 0 for d in draws):
        best: list[int] = logits.argmax(dim=-1).tolist()
        return best
    alike: dict[tuple[float, int, float], list[int]] = {}
    for i, d in enumerate(draws):
        alike.setdefault((d.params.temperature, d.params.top_k, d.params.top_p), []).append(i)
    tokens = [0] * len(draws)
    for rows in alike.values():
        params = draws[rows[0]].params
        mine = logits[torch.tensor(rows, device=logits.device)]
        if params.temperature == 0:
            picked = mine.argmax(dim=-1)
        else:
            u = torch.tensor([draws[i].next() for i in rows], dtype=torch.float64)
            picked = pick(probabilities(mine, params), u.to(logits.device))
        for i, token in zip(rows, picked.tolist(), strict=True):
            tokens[i] = token
    return tokens
