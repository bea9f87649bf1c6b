"""Tables from which a step's time is read: one evaluation of the predictor, then only + - * /.

All times are nanoseconds of device time over all layers of the largest pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sim.cost.memory import activation_dtype, kv_dtype_of
from sim.cost.parallel import Linear, RankPlan
from sim.cost.predictor import Predictor
from sim.cost.rooflines import Array
from sim.engine.config import EngineConfig

SAMPLER_KERNELS = 6
"""Small kernels of greedy or plain sampling."""
TOP_P_US_PER_ENTRY = 0.41e-2
"""PyTorch's top-p path sorts all logits: 0.41 ms per 100,000 vocabulary entries."""
FA2_MIXED_TILE = 64
"""Query rows to which FlashAttention-2 pads a decode that shares a call with a chunk."""


class Line(NamedTuple):
    """A piecewise-linear function: value[i] + slope[i] * (x - knot[i]) for knot[i] <= x.
    Lists for one lookup, the same numbers as arrays for many."""

    knots: list[float]
    values: list[float]
    slopes: list[float]
    knot_array: Array
    value_array: Array
    slope_array: Array


@dataclass(frozen=True)
class Grid:
    """A bilinear function of (query tokens, prefix tokens); rows are query knots."""

    q_knots: list[float]
    p_knots: list[float]
    values: list[list[float]]


@dataclass(frozen=True)
class AttentionKind:
    layers: int
    window: int | None


class Tables:
    """Everything the step cost reads, for one replica configuration."""

    def __init__(self, rank: RankPlan, engine: EngineConfig, predictor: Predictor) -> None:
        self.rank = rank
        self.engine = engine
        self.predictor = predictor
        self.dtype = activation_dtype(rank.model, engine)
        self.kv_dtype = kv_dtype_of(rank.model, engine)
        self.weight_dtype = engine.quantization or rank.model.quantization or self.dtype
        self.kinds = _attention_kinds(rank, engine)
        self.linear, self.moe, self.comm = self._token_tables()
        self.head = self._head_table()
        self.attention_ns = self._attention_overhead()
        self.chunks = self._chunk_grid()

    # By number of tokens.

    def _token_tables(self) -> tuple[Array, Array, Array]:
        engine = self.engine
        top = max(engine.max_num_batched_tokens, engine.max_num_seqs * engine.decode_query_len)
        knots = _token_knots(top)
        index = _padded(engine, top)

        def dense(us: Array) -> Array:
            return np.interp(index, knots, us)[: top + 1] * 1e3

        m = knots.astype(np.float64)
        tables = dense(self._linear_us(m)), dense(self._moe_us(m)), dense(self._comm_us(m))
        for table in tables:
            table[0] = 0.0
        return tables

    def _linear_us(self, m: Array) -> Array:
        rank, model = self.rank, self.rank.model
        total = np.zeros_like(m)
        for x in rank.linears:
            total += x.layers * self.predictor.gemm_us(m, x.n, x.k, self._dtype_of(x))
        total += rank.stage_layers * self._layer_elementwise_us(m)
        embed = self.predictor.elementwise_us(4 * m * model.hidden)
        norm = self.predictor.elementwise_us(8 * m * model.hidden)
        total += embed + norm
        return total

    def _dtype_of(self, linear: Linear) -> str:
        if not linear.quantized or self.weight_dtype == "mxfp4":
            return self.dtype
        return self.weight_dtype

    def _layer_elementwise_us(self, m: Array) -> Array:
        """Norms with residual, rotary embedding, KV write, activation of one layer."""
        rank, model = self.rank, self.rank.model
        head_bytes = (rank.heads + rank.kv_heads) * model.head_dim * 2
        kv_bytes = 2 * rank.kv_heads * model.head_dim * 2
        moved = [8 * model.hidden, 2 * head_bytes, 2 * kv_bytes]
        if not model.parallel_attention:
            moved.append(8 * model.hidden)
        if model.qk_norm:
            moved.append(2 * head_bytes)
        if rank.stage_dense_layers or (model.moe and model.moe.shared_intermediate):
            width = model.intermediate if rank.stage_dense_layers else 0
            if model.moe and not width:
                width = model.moe.shared_intermediate
            moved.append((6 if model.gated else 4) * width // rank.tp)
        total = np.zeros_like(m)
        for size in moved:
            total += self.predictor.elementwise_us(m * size)
        return total

    def _moe_us(self, m: Array) -> Array:
        rank, moe = self.rank, self.rank.model.moe
        if moe is None:
            return np.zeros_like(m)
        tp = 1 if rank.expert_parallel else rank.tp
        dtype = self.weight_dtype
        tokens = m * (rank.dp if rank.expert_parallel else 1)
        us = self.predictor.moe_us(
            tokens, rank.model.hidden, moe.intermediate, moe.topk, moe.experts, tp, rank.ep, dtype
        )
        return us * rank.stage_moe_layers

    def _comm_us(self, m: Array) -> Array:
        rank, model = self.rank, self.rank.model
        size = m * model.hidden * 2
        total = np.zeros_like(m)
        if rank.tp > 1:
            calls = rank.stage_layers * (1 if model.parallel_attention else 2) + 1
            total += calls * self.predictor.collective_us("all_reduce", size, rank.tp)
        if rank.expert_parallel and rank.dp > 1:
            both = self.predictor.collective_us("all_gather", size * rank.dp, rank.dp)
            both = both + self.predictor.collective_us("reduce_scatter", size * rank.dp, rank.dp)
            total += rank.stage_moe_layers * both
        if rank.pp > 1:
            total += self.predictor.collective_us("send_recv", size / rank.tp, 2)
        return total

    # By number of sampled sequences.

    def _head_table(self) -> Array:
        """lm_head on the sampled positions, gathering the logits, and sampling."""
        rank, model = self.rank, self.rank.model
        top = self.engine.max_num_seqs * self.engine.decode_query_len
        knots = _token_knots(max(top, 1))
        m = knots.astype(np.float64)
        us = self.predictor.gemm_us(m, rank.vocab, model.hidden, self.dtype)
        if rank.tp > 1:
            us = us + self.predictor.collective_us("all_gather", m * model.vocab * 2, rank.tp)
        us = us + SAMPLER_KERNELS * self.predictor.elementwise_us(m * model.vocab * 4)
        if model.top_p:
            us = us + TOP_P_US_PER_ENTRY * model.vocab
        table = np.interp(np.arange(top + 1), knots, us) * 1e3
        table[0] = 0.0
        return table

    # Attention.

    def _attention_overhead(self) -> float:
        """Fixed cost of one attention call, all layers, counted once per step."""
        tiny = self._prefill_us(np.array([1.0]), np.array([0.0]), None)
        return float(tiny[0]) * 0.8 * self.rank.stage_layers * 1e3

    def _attention_shape(self) -> tuple[int, int, int]:
        """(heads, KV heads, head size) of this GPU's attention; MLA decodes as one wide KV head."""
        rank, mla = self.rank, self.rank.model.mla
        if mla is None:
            return rank.heads, rank.kv_heads, rank.model.head_dim
        return rank.heads, 1, mla.kv_lora + mla.rope_dim

    def _prefill_us(self, q: Array, prefix: Array, window: int | None) -> Array:
        rank, mla = self.rank, self.rank.model.mla
        if window is not None:
            prefix = np.minimum(prefix, window)
        if mla is not None:
            # Prefill runs as plain attention on the up-projected keys.
            heads, dim = rank.heads, mla.nope_dim + mla.rope_dim
            return self.predictor.prefill_us(q, prefix, heads, heads, dim, self.kv_dtype)
        return self.predictor.prefill_us(q, prefix, *self._attention_shape(), self.kv_dtype)

    def _chunk_grid(self) -> Grid:
        """Device time of one chunk beyond the call's fixed cost."""
        q = _token_knots(self.engine.max_num_batched_tokens).astype(np.float64)
        p = _context_knots(self.engine.max_model_len, first=0.0)
        total = np.zeros((len(q), len(p)))
        for kind in self.kinds:
            us = self._prefill_us(q[:, None], p[None, :], kind.window)
            total += kind.layers * 1e3 * us
        total = np.maximum(total - self.attention_ns, 0.0)
        # One more row and column with the last slope, so that lookups never run over the edge.
        return Grid(q.tolist(), p.tolist(), total.tolist())

    def decode_line(self, batch: int, query_len: int = 1) -> Line:
        """Attention of `batch` decodes alone in a call, by their summed context.
        Knots are sums of contexts."""
        context = _context_knots(self.engine.max_model_len, first=1.0)
        heads, kv_heads, dim = self._attention_shape()
        total = np.zeros_like(context)
        for kind in self.kinds:
            seen = context if kind.window is None else np.minimum(context, kind.window)
            us = self.predictor.decode_us(
                batch, seen, heads * query_len, kv_heads, dim, self.kv_dtype
            )
            total += kind.layers * 1e3 * us
        return _line(context * batch, total)

    def mixed_line(self, batch: int, query_len: int = 1) -> Line:
        """What the decodes add to a call that a prefill chunk opened."""
        plain = self.decode_line(batch, query_len)
        knots, values = plain.knot_array, plain.value_array - self.attention_ns
        if self.predictor.gpu.attention == "fa2" and self.rank.model.mla is None:
            values = np.maximum(values, self._padded_decode_ns(batch, knots / batch))
        return _line(knots, np.maximum(values, 0.0))

    def _padded_decode_ns(self, batch: int, context: Array) -> Array:
        """FlashAttention-2 gives a decode in a mixed call a whole query tile per head: no split
        over the context, no packing of the heads that share a KV head."""
        heads, _, dim = self._attention_shape()
        gpu = self.predictor.gpu
        total = np.zeros_like(context)
        for kind in self.kinds:
            seen = context if kind.window is None else np.minimum(context, kind.window)
            flops = 4.0 * dim * FA2_MIXED_TILE * heads * batch * seen
            total += kind.layers * flops / (0.5 * gpu.peak_flops("bf16")) * 1e9
        return total


def _attention_kinds(rank: RankPlan, engine: EngineConfig) -> tuple[AttentionKind, ...]:
    model, layers = rank.model, rank.stage_layers
    window, windowed = engine.sliding_window, layers
    if window is None and model.sliding_window is not None:
        window = model.sliding_window
        if model.sliding_layers is not None:
            windowed = -(-model.sliding_layers // rank.pp)
    if window is None and model.attention_chunk is not None:
        window, windowed = model.attention_chunk, model.chunked_layers // rank.pp
    if window is None:
        return (AttentionKind(layers, None),)
    kinds = (AttentionKind(layers - windowed, None), AttentionKind(windowed, window))
    return tuple(k for k in kinds if k.layers)


def _token_knots(top: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Token counts at which the predictor is evaluated: dense where tiles change."""
    knots = {1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, top}
    step = 64
    n = 256
    while n < top:
        knots.add(n)
        while n // 8 > step:
            step *= 2
        n += step
    return np.array(sorted(k for k in knots if k <= top), dtype=np.int64)


def _context_knots(longest: int, first: float) -> Array:
    """Context lengths: four per octave from 64 to `longest`."""
    count = int(np.ceil(4 * np.log2(max(longest, 65) / 64)))
    knots = 64 * 2 ** (np.arange(count + 1) / 4)
    return np.concatenate(([first, 16.0, 32.0], np.round(knots)))


def _padded(engine: EngineConfig, top: int) -> Array:
    """The token count that runs for each scheduled one: CUDA graphs pad to captured sizes."""
    counts = np.arange(top + 1)
    sizes = np.array(engine.capture_sizes(), dtype=np.int64)
    if len(sizes) == 0:
        return counts.astype(np.float64)
    at = np.searchsorted(sizes, counts)
    return np.where(at < len(sizes), sizes[np.minimum(at, len(sizes) - 1)], counts).astype(float)


def _line(knots: Array, values: Array) -> Line:
    slopes = np.diff(values) / np.diff(knots)
    slopes = np.append(slopes, slopes[-1])
    return Line(knots.tolist(), values.tolist(), slopes.tolist(), knots, values, slopes)
