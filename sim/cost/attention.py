"""Tables of a step's attention, all layers, in nanoseconds.

One call attends for all requests of a step. Its time is a fixed cost, plus the work of every chunk
and of the decodes, plus the longest *tail*: what the slowest thread block of the call still runs
when the others are done. Work adds up over the GPU; tails overlap.

FlashAttention-2 gives a decode that shares a call with a chunk a whole query tile per head, without
splitting its context over the GPU and without packing the heads of a KV head. That makes a step
with any chunk far more expensive than one without (measured in `attn_mixed`, and seen as about
100 us per layer on A100 and L40S deployments). FlashAttention-3 splits and packs as usual; other
backends call their decode kernel separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sim.cost.memory import kv_dtype_of
from sim.cost.operators.base import Array
from sim.cost.parallel import RankPlan
from sim.cost.predictor import Predictor
from sim.engine.config import EngineConfig

CALL_SHARE = 0.85
"""Share of the shortest call that is fixed cost rather than work."""
FULL_WAVES = 4
"""Thread blocks per multiprocessor at which a call's time is work alone."""
TILE = 64
"""Query rows per thread block, for counting waves."""
SHORTEST_CHUNK = 16
"""Rows below which a chunk costs no less; a decode in FlashAttention-2's mixed call is one."""


class Line(NamedTuple):
    """A piecewise-linear function: value[i] + slope[i] * (x - knot[i]) for knot[i] <= x.
    Lists for one lookup, the same numbers as arrays for many."""

    knots: list[float]
    values: list[float]
    slopes: list[float]
    knot_array: Array
    value_array: Array
    slope_array: Array


class Decodes(NamedTuple):
    """Attention of a batch of decodes by their summed context: work and tail, equal knots."""

    work: Line
    tail: Line
    calibrated: int
    """Index of the last knot whose context and batch size were timed; -1: the batch was not."""


@dataclass(frozen=True)
class Chunks:
    """Work and tail of one chunk, bilinear in (query tokens, prefix); rows are query knots."""

    q_knots: list[float]
    p_knots: list[float]
    work: list[list[float]]
    tail: list[list[float]]


@dataclass(frozen=True)
class _Kind:
    """Layers that attend alike."""

    layers: int
    window: int | None


class AttentionTables:
    """Fixed cost, chunks and decodes of one replica's attention, all of it `scale` times what is
    predicted."""

    def __init__(
        self, rank: RankPlan, engine: EngineConfig, predictor: Predictor, scale: float = 1.0
    ) -> None:
        self._rank = rank
        self._ns = 1e3 * scale
        self._predictor = predictor
        self._longest = engine.max_model_len
        self._kv_dtype = kv_dtype_of(rank.model, engine)
        self._kinds = _kinds(rank, engine)
        mla = rank.model.mla
        if mla is None:
            self._shape = (rank.heads, rank.kv_heads, rank.model.head_dim)
        else:
            # The latent is one wide KV head; queries are projected into it.
            self._shape = (rank.heads, 1, mla.kv_lora + mla.rope_dim)
        self.backend = "separate" if mla is not None else predictor.gpu.attention
        shortest = self._prefill(np.array([float(SHORTEST_CHUNK)]), np.array([0.0]), 1.0, None)
        self.call_ns = float(shortest[0]) * CALL_SHARE * rank.stage_layers
        self.chunks = self._chunk_tables(engine.max_num_batched_tokens)
        self._contexts = _octaves(64.0, self._longest, 4, (1.0, 16.0, 32.0))
        self._batches = _batches(engine.max_num_seqs)
        self._knots = self._contexts * np.arange(1, engine.max_num_seqs + 1)[:, None]
        self._alone: dict[int, _Table] = {}
        self._among: dict[int, _Table] = {}
        if engine.decode_query_len == 1:  # every step needs them
            self.decodes(1)
            self.mixed(1)

    def decodes(self, batch: int, query_len: int = 1) -> Decodes:
        """Decodes that have the call for themselves; the work holds the call's fixed cost."""
        table = self._alone.get(query_len)
        if table is None:
            work = self._spread(self._alone_ns(query_len))
            table = self._alone[query_len] = _Table(self._knots, work, 0 * work)
        return table.of(batch, self._calibrated(batch))

    def mixed(self, batch: int, query_len: int = 1) -> Decodes:
        """What the decodes add to a call that chunks opened."""
        table = self._among.get(query_len)
        if table is None:
            if self.backend == "fa2":
                work, tail = map(self._spread, self._unsplit_ns(query_len))
            else:
                work = self._spread(self._alone_ns(query_len))
                if self.backend == "fa3":
                    work = np.maximum(work - self.call_ns, 0.0)
                tail = 0 * work
            table = self._among[query_len] = _Table(self._knots, work, tail)
        return table.of(batch, self._calibrated(batch))

    def _spread(self, values: Array) -> Array:
        """From the batch sizes that are predicted to all of them: rows 1, 2, ..."""
        row = {batch: i for i, batch in enumerate(self._batches)}
        low, high, part = zip(*map(_neighbours, range(1, len(self._knots) + 1)), strict=True)
        below, above = values[[row[n] for n in low]], values[[row[n] for n in high]]
        result: Array = below + (above - below) * np.array(part)[:, None]
        return result

    def _calibrated(self, batch: int) -> int:
        low, high = self._predictor.range_of("decode", "batch", kv_dtype=self._kv_dtype)
        if not low <= batch <= high:
            return -1
        longest = self._predictor.range_of("decode", "kv_len", kv_dtype=self._kv_dtype)[1]
        return int(np.searchsorted(self._contexts, longest, side="right")) - 1

    # A call of the predictor costs more than its points: all batch sizes [sizes, contexts] at once.

    def _alone_ns(self, query_len: int) -> Array:
        """All layers' decode calls."""
        batches = np.array(self._batches, dtype=np.float64)[:, None]
        total = np.zeros((len(batches), len(self._contexts)))
        heads, kv_heads, dim = self._shape
        for kind in self._kinds:
            seen = self._contexts
            if kind.window is not None:
                seen = np.minimum(seen, kind.window)
            us = self._predictor.decode_us(
                batches, seen[None, :], heads * query_len, kv_heads, dim, self._kv_dtype
            )
            total += kind.layers * self._ns * us
        result: Array = np.maximum.accumulate(total, axis=1)
        return result

    def _unsplit_ns(self, query_len: int) -> tuple[Array, Array]:
        """Work and tail of decodes as FlashAttention-2 runs them among chunks."""
        batches = np.array(self._batches, dtype=np.float64)[:, None]
        rows = np.full((1, len(self._contexts)), float(max(SHORTEST_CHUNK, query_len)))
        prefix = np.maximum(self._contexts - rows, 0.0)
        work = np.zeros((len(batches), len(self._contexts)))
        tail = np.zeros_like(work)
        for kind in self._kinds:
            more, rest = self._work_and_tail(rows, prefix, batches, kind.window)
            work += kind.layers * more
            tail += kind.layers * rest
        return np.maximum.accumulate(work, axis=1), tail

    def _chunk_tables(self, most: int) -> Chunks:
        q = token_knots(max(most, 2)).astype(np.float64)  # two knots make a line
        # Work is nearly linear in the prefix.
        p = _octaves(64.0, self._longest, 1, (0.0,))
        rows, prefix = np.maximum(q, SHORTEST_CHUNK)[:, None], p[None, :]
        work, tail = np.zeros((len(q), len(p))), np.zeros((len(q), len(p)))
        for kind in self._kinds:
            more, rest = self._work_and_tail(rows, prefix, 1.0, kind.window)
            work += kind.layers * more
            tail += kind.layers * rest
        work = np.maximum.accumulate(np.maximum.accumulate(work, axis=0), axis=1)
        return Chunks(q.tolist(), p.tolist(), work.tolist(), tail.tolist())

    def _work_and_tail(
        self, q: Array, prefix: Array, batch: Array | float, window: int | None
    ) -> tuple[Array, Array]:
        """Of one layer: the time that `batch` equal chunks take of a full GPU, and how much longer
        they take when they are alone on it."""
        call = self.call_ns / self._rank.stage_layers
        blocks = self._rank.heads * np.ceil(q / TILE)
        filling = np.maximum(batch, FULL_WAVES * self._predictor.gpu.sms / blocks)
        work = batch * np.maximum(self._prefill(q, prefix, filling, window) - call, 0.0) / filling
        alone = self._prefill(q, prefix, batch, window) - call
        return work, np.maximum(alone - work, 0.0)

    def _prefill(self, q: Array, prefix: Array, batch: Array | float, window: int | None) -> Array:
        """Nanoseconds of one layer's call of `batch` chunks."""
        rank, mla = self._rank, self._rank.model.mla
        if window is not None:
            prefix = np.minimum(prefix, window)
        heads, kv_heads, dim = self._shape
        if mla is not None:
            # Prefill runs as plain attention on the up-projected keys.
            heads, kv_heads, dim = rank.heads, rank.heads, mla.nope_dim + mla.rope_dim
        return self._ns * self._predictor.prefill_us(
            q, prefix, heads, kv_heads, dim, self._kv_dtype, batch
        )


def _kinds(rank: RankPlan, engine: EngineConfig) -> tuple[_Kind, ...]:
    model, layers = rank.model, rank.stage_layers
    window, windowed = engine.sliding_window, layers
    if window is None and model.sliding_window is not None:
        window = model.sliding_window
        if model.sliding_layers is not None:
            windowed = -(-model.sliding_layers // rank.pp)
    if window is None and model.attention_chunk is not None:
        window, windowed = model.attention_chunk, model.chunked_layers // rank.pp
    if window is None:
        return (_Kind(layers, None),)
    kinds = (_Kind(layers - windowed, None), _Kind(windowed, window))
    return tuple(k for k in kinds if k.layers)


def _neighbours(batch: int) -> tuple[int, int, float]:
    """The two batch sizes of the table around one, and how far it is between them: every size up
    to 4, then two per octave."""
    if batch <= 4:
        return batch, batch, 0.0
    octave = 1 << (batch.bit_length() - 1)
    if batch == octave:
        return batch, batch, 0.0
    middle = octave + octave // 2
    low, high = (octave, middle) if batch < middle else (middle, 2 * octave)
    return low, high, (batch - low) / (high - low)


def _batches(most: int) -> list[int]:
    """The batch sizes of the table around all those up to `most`."""
    return sorted({size for batch in range(1, most + 1) for size in _neighbours(batch)[:2]})


def _octaves(start: float, longest: int, per_octave: int, first: tuple[float, ...]) -> Array:
    """`first`, then from `start` on so many values per octave, to `longest` or just beyond."""
    count = int(np.ceil(per_octave * np.log2(max(longest, start + 1) / start)))
    return np.concatenate((first, np.round(start * 2 ** (np.arange(count + 1) / per_octave))))


def token_knots(top: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Token counts at which the predictor is evaluated: dense where tiles change."""
    knots = {1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, top}
    step, n = 64, 256
    while n < top:
        knots.add(n)
        while n // 8 > step:
            step *= 2
        n += step
    return np.array(sorted(k for k in knots if k <= top), dtype=np.int64)


class _Table:
    """Lines of every batch size [sizes, contexts]; the knots are summed contexts."""

    def __init__(self, knots: Array, work: Array, tail: Array) -> None:
        self._knots = knots
        self._lines = [(values, _slopes(knots, values)) for values in (work, tail)]

    def of(self, batch: int, calibrated: int) -> Decodes:
        knots = self._knots[batch - 1]
        listed = knots.tolist()
        work, tail = (
            Line(listed, values.tolist(), slopes.tolist(), knots, values, slopes)
            for values, slopes in ((v[batch - 1], s[batch - 1]) for v, s in self._lines)
        )
        return Decodes(work, tail, calibrated)


def _slopes(knots: Array, values: Array) -> Array:
    """Of the pieces that begin at each knot; the last goes on like the one before it."""
    slopes = np.diff(values) / np.diff(knots)
    result: Array = np.concatenate((slopes, slopes[:, -1:]), axis=1)
    return result
