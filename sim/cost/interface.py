"""What the engine asks of a cost model, and what a cost model may look at.

A step is described by its shape only: the engine never tells the cost model which requests run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True)
class StepShape:
    """The work of one engine step on one replica, before any parallel plan divides it.

    A *decode* is a scheduled request whose whole prompt is computed; it brings one token, or one
    plus its drafts. Everything else scheduled is a *prefill* chunk. The context of a decode is the
    number of KV entries its (first) new token attends to, itself included: computed + 1.
    """

    num_decodes: int
    decode_context: int
    """Sum of the decodes' contexts, tokens."""
    decode_context_sq: int
    """Sum of the squares of the decodes' contexts (length skew)."""
    prefills: Sequence[tuple[int, int]]
    """(query tokens, prefix tokens already in the KV cache) of each chunk, in schedule order."""
    num_sampled: int
    """Requests that sample in this step: decodes and chunks that complete their prompt."""
    decode_tokens: int = -1
    """Query tokens of all decodes; -1 means `num_decodes` (no speculation)."""

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes if self.decode_tokens < 0 else self.decode_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + sum(q for q, _ in self.prefills)


@dataclass
class StepShapes:
    """Many step shapes in columns (the step table); `chunk_*` are flat, `chunk_step` says whose."""

    num_decodes: IntArray
    decode_tokens: IntArray
    decode_context: IntArray
    decode_context_sq: IntArray
    num_sampled: IntArray
    num_tokens: IntArray
    """Decode tokens + prefill tokens."""
    chunk_step: IntArray
    chunk_tokens: IntArray
    chunk_prefix: IntArray


PARTS = ("attention", "linear", "moe", "communication", "host")
"""The parts of a step's duration; they sum to it. `linear` holds all other model operators."""


class CostModel(Protocol):
    """Nanoseconds for step shapes. Deterministic; equal shapes cost equally, in any call."""

    def step_ns(self, shape: StepShape) -> int:
        """Duration of one step: from the end of the step before it, when the engine is busy, to
        its own end. With async scheduling the host works while the device runs and the duration
        is the longer of the two; without, it is their sum. At least 1."""
        ...

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        """Durations of `n` consecutive decode-only steps of one fixed batch. Each request's
        context grows by one per step; the arguments describe the first step. Element `i` equals
        `step_ns` of that step's shape exactly."""
        ...

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        """Seconds per step for each name in `PARTS`, vectorised; the sum over parts equals the
        step's duration to within rounding (1 ns)."""
        ...

    def arrival_ns(self, prompt_tokens: int) -> int:
        """Delay from the client's sending to the engine core's queue (HTTP, tokenisation)."""
        ...

    def delivery_ns(self, num_running: int) -> int:
        """Delay from the end of a step to its tokens at the client (output processing, HTTP)."""
        ...

    def describe(self) -> dict[str, Any]:
        """`profile`, `provenance`, `extrapolated_fraction` so far, and whatever else explains."""
        ...


class DecodeEnds(Protocol):
    """`decode_ends` bound to a cost model; one may bring a faster one as a method."""

    def __call__(
        self,
        start_ns: int,
        num_decodes: int,
        decode_context: int,
        decode_context_sq: int,
        n: int,
    ) -> list[int]: ...


def decode_ends(
    cost: CostModel,
    start_ns: int,
    num_decodes: int,
    decode_context: int,
    decode_context_sq: int,
    n: int,
) -> list[int]:
    """When each of `n` consecutive decode-only steps of one fixed batch ends, the first of which
    starts at `start_ns`; the other arguments are those of `CostModel.decode_run_ns`."""
    durations = cost.decode_run_ns(num_decodes, decode_context, decode_context_sq, n)
    ends: list[int] = (start_ns + durations.cumsum()).tolist()
    return ends
