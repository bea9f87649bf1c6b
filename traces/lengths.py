"""How long prompts and outputs are, in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sim.errors import UserError

from .values import MAX_TOKENS

Ints = npt.NDArray[np.int64]

Z90 = 1.2815515655446004
"""The standard normal's 90th percentile."""


@dataclass
class Drawn:
    """Lengths, at least 1, and how many of them were changed by bounds."""

    tokens: Ints
    clipped: int = 0


class Lengths(Protocol):
    """A distribution of lengths."""

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        """`n` independent lengths; the first k do not depend on n."""


@dataclass(frozen=True)
class Fixed:
    """Always `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _check("fixed", self.tokens)

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        return Drawn(np.full(n, self.tokens, dtype=np.int64))


@dataclass(frozen=True)
class Uniform:
    """Every whole number from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check("uniform", self.low, self.high)
        if self.low > self.high:
            raise UserError(f"uniform({self.low},{self.high}): the lower bound is the larger one")

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        return Drawn(rng.integers(self.low, self.high, n, endpoint=True))


@dataclass(frozen=True)
class Lognormal:
    """Lognormal with the given median and 90th percentile, rounded, at least 1.

    Only bounds that the user gives clip it; how many lengths they changed is counted.
    """

    median: float
    p90: float
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        shown = f"lognormal({self.median:g},{self.p90:g})"
        if not 1 <= self.median <= self.p90 <= MAX_TOKENS:
            raise UserError(f"{shown}: needs 1 <= median <= P90 <= {MAX_TOKENS}")
        _check("lognormal", self.min, *([] if self.max is None else [self.max]))
        if self.max is not None and self.min > self.max:
            raise UserError(f"{shown}: min {self.min} is above max {self.max}")

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        sigma = math.log(self.p90 / self.median) / Z90
        exact = np.exp(math.log(self.median) + sigma * rng.standard_normal(n))
        if self.max is None and n and exact.max() > MAX_TOKENS:
            raise UserError(
                f"lognormal({self.median:g},{self.p90:g}): drew {exact.max():.3g} tokens; "
                "give it a max="
            )
        rounded = np.maximum(np.rint(exact), 1)
        tokens = np.clip(rounded, self.min, self.max)
        return Drawn(tokens.astype(np.int64), int(np.count_nonzero(tokens != rounded)))


@dataclass(frozen=True)
class Empirical:
    """Drawn, with replacement, from observed lengths."""

    observed: Ints

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        return Drawn(self.observed[rng.integers(0, len(self.observed), n)])


@dataclass(frozen=True)
class EmpiricalPairs:
    """Prompt and output lengths of observed requests, drawn with replacement, kept together."""

    prompt: Ints
    output: Ints

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Drawn, Drawn]:
        rows = rng.integers(0, len(self.prompt), n)
        return Drawn(self.prompt[rows]), Drawn(self.output[rows])


def _check(what: str, *tokens: int) -> None:
    for value in tokens:
        if not 1 <= value <= MAX_TOKENS:
            raise UserError(f"{what}: a length must be 1 to {MAX_TOKENS} tokens, not {value}")
