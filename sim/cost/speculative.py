"""The draft model's part of a step, as vLLM runs it: after each verification
`num_speculative_tokens` passes, one after the other, on the GPUs of the last pipeline stage.

The first pass runs over the tokens that the target has just computed, prompts included, so that the
draft model's KV cache keeps up; each further pass over one token of every sequence that sampled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from sim.cost.host import NO_HOST, overlaps
from sim.cost.interface import PARTS, FloatArray, IntArray, StepShape, StepShapes
from sim.cost.models import ModelShape
from sim.cost.parallel import draft_engine, draft_rank
from sim.cost.server import server_fit
from sim.cost.step import StepCost
from sim.cost.tables import Tables


def with_draft(target: StepCost, draft: ModelShape) -> SpeculativeCost:
    """The target's steps with the draft model's passes in them. Raises UserError."""
    tables = target.tables
    rank = draft_rank(tables.rank.model, draft, tables.engine)
    engine, predictor = draft_engine(tables.engine, draft), tables.predictor
    own = Tables(rank, engine, predictor, server_fit(predictor.profile).scale)
    return SpeculativeCost(
        target,
        StepCost(tables, NO_HOST, target.frontend, {}),
        StepCost(own, NO_HOST, target.frontend, {}),
        tables.engine.num_speculative_tokens,
    )


class SpeculativeCost:
    """A `CostModel`: the target's step, then the passes of the draft model. The host's work
    overlaps with both where it overlaps at all."""

    def __init__(
        self, target: StepCost, device: StepCost, draft: StepCost, num_passes: int
    ) -> None:
        """`device` is the target without its host; `draft` has none either."""
        self.target = target
        self.draft = draft
        self.num_passes = num_passes
        self._device = device
        self._overlaps = overlaps(target.tables.engine)

    def __copy__(self) -> SpeculativeCost:
        target, device, draft = map(copy.copy, (self.target, self._device, self.draft))
        return SpeculativeCost(target, device, draft, self.num_passes)

    def step_ns(self, shape: StepShape) -> int:
        whole, drafting = self.target.step_ns(shape), self._draft_ns(shape)
        if self._overlaps:
            return max(whole, self._device.step_ns(shape) + drafting)
        return whole + drafting

    def stages_ns(self, shape: StepShape) -> tuple[int, ...]:
        """Duration in each pipeline stage; the last one drafts."""
        return (*self.target.stages_ns(shape)[:-1], self.step_ns(shape))

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        ends = []
        for i in range(n):
            squares = decode_context_sq + 2 * decode_context * i + num_decodes * i * i
            context = decode_context + num_decodes * i
            ends.append(self.step_ns(StepShape(num_decodes, context, squares, (), num_decodes)))
        return np.array(ends, dtype=np.int64)

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        target, device = self.target.parts_s(shapes), self._device.parts_s(shapes)
        drafting = self._draft_parts_s(shapes)
        whole, passes = sum(target.values()), sum(drafting.values())
        total = whole + passes
        if self._overlaps:
            total = np.maximum(whole, sum(device.values()) + passes)
        parts = {name: target[name] + drafting[name] for name in PARTS if name != "host"}
        return {**parts, "host": np.maximum(total - sum(parts.values()), 0.0)}

    def arrival_ns(self, prompt_tokens: int) -> int:
        return self.target.arrival_ns(prompt_tokens)

    def delivery_ns(self, num_running: int) -> int:
        return self.target.delivery_ns(num_running)

    def describe(self) -> dict[str, Any]:
        described = self.target.describe()
        beyond = self.draft.describe()["extrapolated_fraction"]
        return {
            **described,
            "draft_model": self.draft.tables.rank.model.name,
            "extrapolated_fraction": max(described["extrapolated_fraction"], beyond),
        }

    def _draft_ns(self, shape: StepShape) -> int:
        return self.draft.step_ns(_first_pass(shape)) + int(self._further_ns(shape).sum())

    def _further_ns(self, shape: StepShape) -> IntArray:
        """Durations of all passes but the first: decodes of one token."""
        if self.num_passes < 2 or not shape.num_sampled:
            return np.zeros(0, dtype=np.int64)
        # Prompts that end here draft, too. The chunks that do not end their prompt come last.
        done = shape.prefills[: shape.num_sampled - shape.num_decodes]
        lengths = [query + prefix + 1 for query, prefix in done]
        context = shape.decode_context + shape.num_decodes + sum(lengths)
        squares = shape.decode_context_sq + 2 * shape.decode_context + shape.num_decodes
        squares += sum(n * n for n in lengths)
        return self.draft.decode_run_ns(shape.num_sampled, context, squares, self.num_passes - 1)

    def _draft_parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        sampled = _sampled_once(shapes.num_sampled, shapes.decode_tokens, shapes.num_decodes)
        parts = self.draft.parts_s(replace(shapes, num_sampled=sampled))
        for further in self._further_shapes(shapes):
            each = self.draft.parts_s(further)
            for name in PARTS:
                parts[name] = parts[name] + np.where(further.num_sampled > 0, each[name], 0.0)
        return parts

    def _further_shapes(self, shapes: StepShapes) -> Iterator[StepShapes]:
        """`_further_ns` in columns: one set of shapes per pass."""
        sampled, none = shapes.num_sampled, np.zeros(0, dtype=np.int64)
        steps = len(sampled)
        first = np.searchsorted(shapes.chunk_step, np.arange(steps))
        place = np.arange(len(shapes.chunk_step)) - first[shapes.chunk_step]
        done = place < (sampled - shapes.num_decodes)[shapes.chunk_step]
        lengths = (shapes.chunk_tokens + shapes.chunk_prefix + 1)[done]
        at = shapes.chunk_step[done]
        context = shapes.decode_context + shapes.num_decodes
        context = context + np.bincount(at, lengths, steps).astype(np.int64)
        squares = shapes.decode_context_sq + 2 * shapes.decode_context + shapes.num_decodes
        squares = squares + np.bincount(at, lengths**2, steps).astype(np.int64)
        for i in range(self.num_passes - 1):
            total = squares + 2 * context * i + sampled * i * i
            yield StepShapes(
                sampled, sampled, context + sampled * i, total, sampled, sampled, none, none, none
            )


def _first_pass(shape: StepShape) -> StepShape:
    sampled = _sampled_once(shape.num_sampled, shape.num_decode_tokens, shape.num_decodes)
    return replace(shape, num_sampled=sampled)


def _sampled_once(sampled: Any, decode_tokens: Any, decodes: Any) -> Any:
    """`num_sampled` for a pass over drafts that needs the logits of each sequence's last token
    only; `StepCost` adds one for every draft to be verified."""
    return sampled - (decode_tokens - decodes)
