"""The duration of an engine step: device time from tables, composed with the host's.

The scalar path (`step_ns`, called for every step) and the vectorised ones do the same additions,
multiplications and divisions in the same order, so that they give equal nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from sim.cost.host import Frontend, HostModel
from sim.cost.interface import FloatArray, IntArray, StepShape, StepShapes
from sim.cost.tables import Grid, Line, Tables

SKEW = 0.2
"""Decode attention costs (1 + SKEW * cv^2 / (1 + cv^2)) times that of equal contexts."""


class StepCost:
    """A `CostModel` over tables. See `sim.cost.build_cost_model`."""

    def __init__(
        self, tables: Tables, host: HostModel, frontend: Frontend, description: dict[str, Any]
    ) -> None:
        engine = tables.engine
        self.tables = tables
        self.host = host
        self.frontend = frontend
        self._description = description
        self._async = engine.async_scheduling
        self._tokens_array = tables.linear + tables.moe + tables.comm
        self._tokens: list[float] = self._tokens_array.tolist()
        self._head: list[float] = tables.head.tolist()
        self._host_array = self._host_ns(engine.max_num_seqs + 1)
        self._host: list[float] = self._host_array.tolist()
        self._attention = tables.attention_ns
        self._chunks = tables.chunks
        self._plain: dict[tuple[int, int], Line] = {}
        self._mixed: dict[tuple[int, int], Line] = {}
        self._steps = 0
        self._beyond = 0

    # One step.

    def step_ns(self, shape: StepShape) -> int:
        decodes = shape.num_decodes
        drafted = shape.decode_tokens
        tokens = decodes if drafted < 0 else drafted
        attention = 0.0
        sequences = decodes
        if shape.prefills:
            attention = self._attention
            for q, prefix in shape.prefills:
                tokens += q
                attention += self._chunk_ns(q, prefix)
            sequences += len(shape.prefills)
        if decodes:
            key = (decodes, 1 if drafted < 0 else -(-drafted // decodes))
            line = self._mixed_line(key) if shape.prefills else self._plain_line(key)
            total = float(shape.decode_context)
            knots, values, slopes = line.knots, line.values, line.slopes
            i = bisect_right(knots, total) - 1
            if i < 0:
                i = 0
            even = values[i] + slopes[i] * (total - knots[i])
            ratio = total * total / (float(decodes) * float(shape.decode_context_sq))
            attention += even * (1.0 + SKEW * (1.0 - ratio))
            if i == len(knots) - 1:
                self._beyond += 1
        self._steps += 1
        device = self._tokens[tokens] + self._head[shape.num_sampled] + attention
        host = self._host[sequences]
        if not self._async:
            return int(device + host + 0.5)
        return int((host if host > device else device) + 0.5)

    def _chunk_ns(self, q: int, prefix: int) -> float:
        grid = self._chunks
        q_knots, p_knots = grid.q_knots, grid.p_knots
        i = bisect_right(q_knots, q) - 1
        if i > len(q_knots) - 2:
            i = len(q_knots) - 2
        low = grid.values[i]
        high = grid.values[i + 1]
        across = (q - q_knots[i]) / (q_knots[i + 1] - q_knots[i])
        if not prefix:
            return low[0] + (high[0] - low[0]) * across
        j = bisect_right(p_knots, prefix) - 1
        if j > len(p_knots) - 2:
            j = len(p_knots) - 2
        along = (prefix - p_knots[j]) / (p_knots[j + 1] - p_knots[j])
        below = low[j] + (low[j + 1] - low[j]) * along
        above = high[j] + (high[j + 1] - high[j]) * along
        return below + (above - below) * across

    # Many steps.

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        i = np.arange(n, dtype=np.int64)
        context = (decode_context + num_decodes * i).astype(np.float64)
        squares = decode_context_sq + 2 * decode_context * i + num_decodes * i * i
        attention, beyond = _decode_ns(
            self._plain_line((num_decodes, 1)), num_decodes, context, squares.astype(np.float64)
        )
        self._steps += n
        self._beyond += beyond
        device = self._tokens[num_decodes] + self._head[num_decodes] + attention
        host = self._host[num_decodes]
        total = np.maximum(device, host) if self._async else device + host
        return (total + 0.5).astype(np.int64)

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        attention, chunks = self._attention_of(shapes)
        tables, tokens = self.tables, shapes.num_tokens
        linear = tables.linear[tokens] + tables.head[shapes.num_sampled]
        moe, comm = tables.moe[tokens], tables.comm[tokens]
        host = self._host_array[shapes.num_decodes + chunks]
        if self._async:
            host = np.maximum(host - (linear + moe + comm + attention), 0.0)
        parts = {
            "attention": attention,
            "linear": linear,
            "moe": moe,
            "communication": comm,
            "host": host,
        }
        return {name: value * 1e-9 for name, value in parts.items()}

    def _attention_of(self, shapes: StepShapes) -> tuple[FloatArray, IntArray]:
        steps = len(shapes.num_decodes)
        chunks = np.bincount(shapes.chunk_step, minlength=steps).astype(np.int64)
        each = _chunks_ns(self._chunks, shapes.chunk_tokens, shapes.chunk_prefix)
        attention = np.where(chunks > 0, self._attention, 0.0)
        attention += np.bincount(shapes.chunk_step, weights=each, minlength=steps)
        per_decode = -(-shapes.decode_tokens // np.maximum(shapes.num_decodes, 1))
        kinds = np.stack([shapes.num_decodes, per_decode, chunks > 0], axis=1)
        rows = np.flatnonzero(shapes.num_decodes)
        if not len(rows):
            return attention, chunks
        distinct, which = np.unique(kinds[rows], axis=0, return_inverse=True)
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(distinct)))
        for (batch, query, mixed), group in zip(
            distinct.tolist(), np.split(rows[order], ends[:-1]), strict=True
        ):
            key = (batch, query)
            line = self._mixed_line(key) if mixed else self._plain_line(key)
            attention[group] += _decode_ns(
                line,
                batch,
                shapes.decode_context[group].astype(np.float64),
                shapes.decode_context_sq[group].astype(np.float64),
            )[0]
        return attention, chunks

    # Around the engine.

    def arrival_ns(self, prompt_tokens: int) -> int:
        f = self.frontend
        return int((f.arrival_us + f.arrival_per_token_us * prompt_tokens) * 1e3 + 0.5)

    def delivery_ns(self, num_running: int) -> int:
        f = self.frontend
        return int((f.delivery_us + f.delivery_per_seq_us * num_running) * 1e3 + 0.5)

    def describe(self) -> dict[str, Any]:
        fraction = self._beyond / self._steps if self._steps else 0.0
        return {**self._description, "extrapolated_fraction": fraction}

    # Lazily built.

    def _plain_line(self, key: tuple[int, int]) -> Line:
        line = self._plain.get(key)
        if line is None:
            line = self._plain[key] = self.tables.decode_line(*key)
        return line

    def _mixed_line(self, key: tuple[int, int]) -> Line:
        line = self._mixed.get(key)
        if line is None:
            line = self._mixed[key] = self.tables.mixed_line(*key)
        return line

    def _host_ns(self, sequences: int) -> FloatArray:
        count = np.arange(sequences + 1, dtype=np.float64)
        h = self.host
        fixed, each = (h.sync_us, h.sync_per_seq_us)
        if self._async:
            fixed, each = (h.async_us, h.async_per_seq_us)
        result: FloatArray = (fixed + each * count) * 1e3
        return result


def _decode_ns(
    line: Line, batch: int, context: FloatArray, squares: FloatArray
) -> tuple[FloatArray, int]:
    """As in `step_ns`, for many steps of one batch size; and how many were beyond the table."""
    knots = line.knot_array
    i = np.maximum(np.searchsorted(knots, context, side="right") - 1, 0)
    even = line.value_array[i] + line.slope_array[i] * (context - knots[i])
    ratio = context * context / (float(batch) * squares)
    beyond = int(np.count_nonzero(i == len(knots) - 1))
    return even * (1.0 + SKEW * (1.0 - ratio)), beyond


def _chunks_ns(grid: Grid, tokens: IntArray, prefix: IntArray) -> FloatArray:
    q, p = np.array(grid.q_knots), np.array(grid.p_knots)
    values = np.array(grid.values)
    i = np.minimum(np.searchsorted(q, tokens, side="right") - 1, len(q) - 2)
    j = np.minimum(np.searchsorted(p, prefix, side="right") - 1, len(p) - 2)
    across = (tokens - q[i]) / (q[i + 1] - q[i])
    along = (prefix - p[j]) / (p[j + 1] - p[j])
    below = values[i, j] + (values[i, j + 1] - values[i, j]) * along
    above = values[i + 1, j] + (values[i + 1, j + 1] - values[i + 1, j]) * along
    result: FloatArray = below + (above - below) * across
    return result
