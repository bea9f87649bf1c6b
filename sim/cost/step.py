"""The duration of an engine step: device time from tables, composed with the host's.

The scalar path (`step_ns`, called for every step) and the vectorised ones do the same additions,
multiplications and divisions in the same order, so that they give equal nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import Any

import numpy as np

from sim.cost.attention import Chunks, Decodes, Line
from sim.cost.host import Frontend, HostModel, overlaps
from sim.cost.interface import FloatArray, IntArray, StepShape, StepShapes
from sim.cost.tables import Tables

SKEW = 0.15
"""Decode attention costs (1 + SKEW * cv^2 / (1 + cv^2)) times that of equal contexts (pure decode
rows of `attn_decode_skew`)."""
VECTOR = 48
"""Steps from which one vectorised call is cheaper than a loop."""
TAIL_SKEW = 2.0
"""The same for the tail, which lasts as long as the longest context."""


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
        self._async = overlaps(engine)
        self._launch = 0.0
        if engine.enforce_eager:
            kernels = host.launches_per_layer * tables.rank.stage_layers
            self._launch = host.launch_us * 1e3 * kernels
        self._tokens_array = tables.linear + tables.moe + tables.comm
        self._tokens: list[float] = self._tokens_array.tolist()
        self._head: list[float] = tables.head.tolist()
        self._host_array = self._host_ns(engine.max_num_seqs + 1)
        self._host: list[float] = self._host_array.tolist()
        self._call = tables.attention.call_ns
        self._chunks = tables.attention.chunks
        self._plain: dict[tuple[int, int], Decodes] = {}
        self._mixed: dict[tuple[int, int], Decodes] = {}
        self._calibrated = tables.calibrated_tokens
        self._steps = 0
        self._beyond = 0

    def __copy__(self) -> StepCost:
        """One that counts its extrapolations on its own from here on."""
        other = StepCost(self.tables, self.host, self.frontend, self._description)
        other._plain, other._mixed = self._plain, self._mixed
        other._steps, other._beyond = self._steps, self._beyond
        return other

    # One step.

    def step_ns(self, shape: StepShape) -> int:
        decodes = shape.num_decodes
        drafted = shape.decode_tokens
        tokens = decodes if drafted < 0 else drafted
        attention = 0.0
        tail = 0.0
        sequences = decodes
        if shape.prefills:
            attention = self._call
            for q, prefix in shape.prefills:
                tokens += q
                work, rest = self._chunk_ns(q, prefix)
                attention += work
                if rest > tail:
                    tail = rest
            sequences += len(shape.prefills)
        if decodes:
            key = (decodes, 1 if drafted < 0 else -(-drafted // decodes))
            lines = self._mixed_lines(key) if shape.prefills else self._plain_lines(key)
            total = float(shape.decode_context)
            knots, values, slopes = lines.work.knots, lines.work.values, lines.work.slopes
            i = bisect_right(knots, total) - 1
            if i < 0:
                i = 0
            along = total - knots[i]
            spread = 1.0 - total * total / (float(decodes) * float(shape.decode_context_sq))
            attention += (values[i] + slopes[i] * along) * (1.0 + SKEW * spread)
            if shape.prefills:
                rest = lines.tail.values[i] + lines.tail.slopes[i] * along
                rest = rest * (1.0 + TAIL_SKEW * spread)
                if rest > tail:
                    tail = rest
            if i > lines.calibrated or tokens > self._calibrated:
                self._beyond += 1
        elif tokens > self._calibrated:
            self._beyond += 1
        attention += tail
        self._steps += 1
        # Every draft is verified on its own logits.
        logits = shape.num_sampled if drafted < 0 else shape.num_sampled + drafted - decodes
        device = self._tokens[tokens] + self._head[logits] + attention
        if device < self._launch:
            device = self._launch
        host = self._host[sequences]
        if not self._async:
            return int(device + host + 0.5)
        return int((host if host > device else device) + 0.5)

    def stages_ns(self, shape: StepShape) -> tuple[int, ...]:
        """Duration in each pipeline stage, in order; all have as many layers as the largest, and
        the last also computes logits and samples."""
        last = self.step_ns(shape)
        if self.tables.rank.pp == 1:
            return (last,)
        headless = replace(shape, num_sampled=shape.num_decodes - shape.num_decode_tokens)
        return (*(self.step_ns(headless),) * (self.tables.rank.pp - 1), last)

    def _chunk_ns(self, q: int, prefix: int) -> tuple[float, float]:
        """Work and tail of one chunk."""
        table = self._chunks
        q_knots, p_knots = table.q_knots, table.p_knots
        i = bisect_right(q_knots, q) - 1
        if i > len(q_knots) - 2:
            i = len(q_knots) - 2
        across = (q - q_knots[i]) / (q_knots[i + 1] - q_knots[i])
        j = 0
        along = 0.0
        if prefix:
            j = bisect_right(p_knots, prefix) - 1
            if j > len(p_knots) - 2:
                j = len(p_knots) - 2
            along = (prefix - p_knots[j]) / (p_knots[j + 1] - p_knots[j])
        low, high = table.work[i], table.work[i + 1]
        below = low[j] + (low[j + 1] - low[j]) * along
        above = high[j] + (high[j + 1] - high[j]) * along
        work = below + (above - below) * across
        low, high = table.tail[i], table.tail[i + 1]
        below = low[j] + (low[j + 1] - low[j]) * along
        above = high[j] + (high[j + 1] - high[j]) * along
        return work, below + (above - below) * across

    # Many steps.

    def decode_ends(
        self,
        start_ns: int,
        num_decodes: int,
        decode_context: int,
        decode_context_sq: int,
        n: int,
    ) -> list[int]:
        """When each of `n` consecutive decode-only steps of one fixed batch ends, the first of
        which starts at `start_ns`: `step_ns` of each step added up, with what does not change
        from step to step looked up once."""
        if n >= VECTOR:
            durations = self.decode_run_ns(num_decodes, decode_context, decode_context_sq, n)
            found: list[int] = (start_ns + durations.cumsum()).tolist()
            return found
        lines = self._plain_lines((num_decodes, 1))
        knots, values, slopes = lines.work.knots, lines.work.values, lines.work.slopes
        calibrated = lines.calibrated if num_decodes <= self._calibrated else -1
        base = self._tokens[num_decodes] + self._head[num_decodes]
        launch, host = self._launch, self._host[num_decodes]
        batch = float(num_decodes)
        asynchronous = self._async
        i = max(bisect_right(knots, decode_context) - 1, 0)
        last = len(knots) - 1
        end_ns = start_ns
        ends = []
        for _ in range(n):
            total = float(decode_context)
            while i < last and knots[i + 1] <= total:
                i += 1
            spread = 1.0 - total * total / (batch * float(decode_context_sq))
            attention = (values[i] + slopes[i] * (total - knots[i])) * (1.0 + SKEW * spread)
            device = base + attention
            if device < launch:
                device = launch
            if asynchronous:
                end_ns += int((host if host > device else device) + 0.5)
            else:
                end_ns += int(device + host + 0.5)
            ends.append(end_ns)
            if i > calibrated:
                self._beyond += 1
            decode_context_sq += 2 * decode_context + num_decodes
            decode_context += num_decodes
        self._steps += n
        return ends

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        i = np.arange(n, dtype=np.int64)
        context = (decode_context + num_decodes * i).astype(np.float64)
        squares = decode_context_sq + 2 * decode_context * i + num_decodes * i * i
        attention, _, beyond = _decode_ns(
            self._plain_lines((num_decodes, 1)), num_decodes, context, squares.astype(np.float64)
        )
        self._steps += n
        if num_decodes > self._calibrated:
            beyond = n
        self._beyond += beyond
        device = self._tokens[num_decodes] + self._head[num_decodes] + attention
        device = np.maximum(device, self._launch)
        host = self._host[num_decodes]
        total = np.maximum(device, host) if self._async else device + host
        return (total + 0.5).astype(np.int64)

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        attention, chunks = self._attention_of(shapes)
        tables, tokens = self.tables, shapes.num_tokens
        logits = shapes.num_sampled + shapes.decode_tokens - shapes.num_decodes
        linear = tables.linear[tokens] + tables.head[logits]
        moe, comm = tables.moe[tokens], tables.comm[tokens]
        device = linear + moe + comm + attention
        host = self._host_array[shapes.num_decodes + chunks]
        if self._async:
            host = np.maximum(host, self._launch) - device
            host = np.maximum(host, 0.0)
        else:
            host = host + np.maximum(self._launch - device, 0.0)
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
        work, rest = _chunks_ns(self._chunks, shapes.chunk_tokens, shapes.chunk_prefix)
        attention = np.where(chunks > 0, self._call, 0.0)
        attention += np.bincount(shapes.chunk_step, weights=work, minlength=steps)
        tail = np.zeros(steps)
        np.maximum.at(tail, shapes.chunk_step, rest)
        per_decode = -(-shapes.decode_tokens // np.maximum(shapes.num_decodes, 1))
        kinds = np.stack([shapes.num_decodes, per_decode, chunks > 0], axis=1)
        rows = np.flatnonzero(shapes.num_decodes)
        if not len(rows):
            return attention + tail, chunks
        distinct, which = np.unique(kinds[rows], axis=0, return_inverse=True)
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(distinct)))
        for (batch, query, mixed), group in zip(
            distinct.tolist(), np.split(rows[order], ends[:-1]), strict=True
        ):
            key = (batch, query)
            work, rest, _ = _decode_ns(
                self._mixed_lines(key) if mixed else self._plain_lines(key),
                batch,
                shapes.decode_context[group].astype(np.float64),
                shapes.decode_context_sq[group].astype(np.float64),
            )
            attention[group] += work
            if mixed:
                tail[group] = np.maximum(tail[group], rest)
        return attention + tail, chunks

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

    def _plain_lines(self, key: tuple[int, int]) -> Decodes:
        lines = self._plain.get(key)
        if lines is None:
            lines = self._plain[key] = self.tables.attention.decodes(*key)
        return lines

    def _mixed_lines(self, key: tuple[int, int]) -> Decodes:
        lines = self._mixed.get(key)
        if lines is None:
            lines = self._mixed[key] = self.tables.attention.mixed(*key)
        return lines

    def _host_ns(self, sequences: int) -> FloatArray:
        count = np.arange(sequences + 1, dtype=np.float64)
        h = self.host
        fixed, each = (h.sync_us, h.sync_per_seq_us)
        if self._async:
            fixed, each = (h.async_us, h.async_per_seq_us)
        result: FloatArray = (fixed + each * count) * 1e3
        return result


def _decode_ns(
    lines: Decodes, batch: int, context: FloatArray, squares: FloatArray
) -> tuple[FloatArray, FloatArray, int]:
    """Work and tail as in `step_ns`, for many steps of one batch size; and how many were beyond
    the table."""
    knots = lines.work.knot_array
    i = np.maximum(np.searchsorted(knots, context, side="right") - 1, 0)
    along = context - knots[i]
    spread = 1.0 - context * context / (float(batch) * squares)
    work = _at(lines.work, i, along) * (1.0 + SKEW * spread)
    tail = _at(lines.tail, i, along) * (1.0 + TAIL_SKEW * spread)
    return work, tail, int(np.count_nonzero(i > lines.calibrated))


def _at(line: Line, i: IntArray, along: FloatArray) -> FloatArray:
    return line.value_array[i] + line.slope_array[i] * along


def _chunks_ns(table: Chunks, tokens: IntArray, prefix: IntArray) -> tuple[FloatArray, FloatArray]:
    """Work and tail of many chunks."""
    q, p = np.array(table.q_knots), np.array(table.p_knots)
    i = np.minimum(np.searchsorted(q, tokens, side="right") - 1, len(q) - 2)
    j = np.minimum(np.searchsorted(p, prefix, side="right") - 1, len(p) - 2)
    across = (tokens - q[i]) / (q[i + 1] - q[i])
    along = (prefix - p[j]) / (p[j + 1] - p[j])

    def bilinear(values: FloatArray) -> FloatArray:
        below = values[i, j] + (values[i, j + 1] - values[i, j]) * along
        above = values[i + 1, j] + (values[i + 1, j + 1] - values[i + 1, j]) * along
        result: FloatArray = below + (above - below) * across
        return result

    return bilinear(np.array(table.work)), bilinear(np.array(table.tail))
