"""A cost model for tests: exact integers, cheap, with every feature of a shape in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.cost.interface import FloatArray, IntArray, StepShape, StepShapes, decode_ends


@dataclass
class LinearCost:
    """Nanoseconds linear in tokens, contexts, squared contexts (all >> 10) and chunk areas."""

    base: int = 1000
    per_token: int = 10
    per_context: int = 1 << 10
    per_context_sq: int = 0
    per_area: int = 1 << 5
    """Per query token of a chunk and token of its prefix, >> 10."""

    def step_ns(self, shape: StepShape) -> int:
        scaled = (
            self.per_context * shape.decode_context + self.per_context_sq * shape.decode_context_sq
        )
        tokens = shape.num_decodes
        for count, prefix in shape.prefills:
            tokens += count
            scaled += self.per_area * count * (prefix + count)
        return self.base + self.per_token * tokens + (scaled >> 10)

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        i = np.arange(n, dtype=np.int64)
        context = decode_context + i * num_decodes
        context_sq = decode_context_sq + i * (2 * decode_context + i * num_decodes)
        scaled = self.per_context * context + self.per_context_sq * context_sq
        return self.base + self.per_token * num_decodes + (scaled >> 10)

    def decode_ends(
        self,
        start_ns: int,
        num_decodes: int,
        decode_context: int,
        decode_context_sq: int,
        n: int,
    ) -> list[int]:
        """As `sim.cost.interface.decode_ends`, without arrays for few steps."""
        if n > 32:
            return decode_ends(self, start_ns, num_decodes, decode_context, decode_context_sq, n)
        fixed = self.base + self.per_token * num_decodes
        per_context, per_context_sq = self.per_context, self.per_context_sq
        ends = []
        for _ in range(n):
            scaled = per_context * decode_context + per_context_sq * decode_context_sq
            start_ns += fixed + (scaled >> 10)
            ends.append(start_ns)
            decode_context_sq += 2 * decode_context + num_decodes
            decode_context += num_decodes
        return ends

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        raise NotImplementedError

    def arrival_ns(self, prompt_tokens: int) -> int:
        return 0

    def delivery_ns(self, num_running: int) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {}
