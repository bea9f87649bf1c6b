"""Tables from which a step's time is read: one evaluation of the predictor, then only + - * /.

All times are nanoseconds of device time over all layers of the largest pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sim.cost.attention import AttentionTables, token_knots
from sim.cost.memory import activation_dtype
from sim.cost.operators.base import Array
from sim.cost.parallel import Linear, RankPlan
from sim.cost.predictor import Predictor
from sim.engine.config import EngineConfig

GAP_US = 2.5
"""Between two kernels launched one by one, over the gap inside a CUDA graph. (A load sweep with
cold prompts on H100: its mixed steps with one or two prompts are 5 to 10 % longer than the sum of
their kernels, its long prefill steps are not.)"""
KERNELS_PER_LAYER = 10
MOE_KERNELS = 4
SAMPLER_KERNELS = 6
"""Small kernels of greedy or plain sampling."""
TOP_P_US_PER_ENTRY = 0.37e-2
TOP_P_US_PER_LOGIT = 6e-5
"""PyTorch's top-p path sorts all logits: 0.37 ms per 100,000 vocabulary entries, and 6 us more for
each sequence. (Fitted on the open deployments; pull requests that replace it time the sort itself
at 0.1 to 0.2 ms plus 6 us per 100,000 logits on a GB200.)"""


class Tables:
    """Everything the step cost reads, for one replica configuration. `scale` gives the factor on
    the device time of an operator class (`sim.cost.server`)."""

    def __init__(
        self,
        rank: RankPlan,
        engine: EngineConfig,
        predictor: Predictor,
        scale: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        self.rank = rank
        self.engine = engine
        self.predictor = predictor
        self.dtype = activation_dtype(rank.model, engine)
        self.weight_dtype = engine.quantization or rank.model.quantization or self.dtype
        linear, moe, comm = self._token_tables()
        self.linear = linear * scale("linear")
        self.moe = moe * scale("moe")
        self.comm = comm * scale("communication")
        self.head = self._head_table() * scale("linear")
        self.calibrated_tokens = self._calibrated_tokens()
        self.attention = AttentionTables(rank, engine, predictor, scale("attention"))

    # By number of tokens.

    def _token_tables(self) -> tuple[Array, Array, Array]:
        engine = self.engine
        top = max(engine.max_num_batched_tokens, engine.max_num_seqs * engine.decode_query_len)
        knots = token_knots(top)
        index = _padded(engine, top)

        def dense(us: Array) -> Array:
            return np.interp(index, knots, us)[: top + 1] * 1e3

        m = knots.astype(np.float64)
        linear = dense(self._linear_us(m))
        sizes = engine.capture_sizes()
        if sizes:  # without any the host's launches decide (`HostModel.launch_us`)
            linear[sizes[-1] + 1 :] += self._gaps_us() * 1e3
        tables = linear, dense(self._moe_us(m)), dense(self._comm_us(m))
        for table in tables:
            table[0] = 0.0
        return tables

    def _gaps_us(self) -> float:
        """What the kernels of a step outside the captured sizes wait for each other."""
        rank = self.rank
        kernels = KERNELS_PER_LAYER + (2 if rank.tp > 1 else 0)
        if rank.model.moe is not None:
            kernels += MOE_KERNELS
        return GAP_US * kernels * rank.stage_layers

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

    def _calibrated_tokens(self) -> int:
        """Tokens per step up to which all operators were timed."""
        dtypes = {self._dtype_of(x) for x in self.rank.linears}
        most = min(self.predictor.range_of("gemm", "m", dtype=d)[1] for d in dtypes)
        if self.rank.model.moe is not None:
            key = {"dtype": self.weight_dtype, "distribution": "balanced"}
            timed = self.predictor.range_of("moe", "tokens", **key)[1]
            most = min(most, timed / (self.rank.dp if self.rank.expert_parallel else 1))
        return int(min(most, 2**31))

    # By number of sampled sequences.

    def _head_table(self) -> Array:
        """lm_head on the sampled positions, gathering the logits, and sampling."""
        rank, model = self.rank, self.rank.model
        top = self.engine.max_num_seqs * self.engine.decode_query_len
        knots = token_knots(max(top, 1))
        m = knots.astype(np.float64)
        us = self.predictor.gemm_us(m, rank.vocab, model.hidden, self.dtype)
        if rank.tp > 1:
            us = us + self.predictor.collective_us("all_gather", m * model.vocab * 2, rank.tp)
        us = us + SAMPLER_KERNELS * self.predictor.elementwise_us(m * model.vocab * 4)
        if model.top_p:
            us = us + (TOP_P_US_PER_ENTRY + TOP_P_US_PER_LOGIT * m) * model.vocab
        table = np.interp(np.arange(top + 1), knots, us) * 1e3
        table[0] = 0.0
        return table


def _padded(engine: EngineConfig, top: int) -> Array:
    """The token count that runs for each scheduled one: CUDA graphs pad to captured sizes."""
    counts = np.arange(top + 1)
    sizes = np.array(engine.capture_sizes(), dtype=np.int64)
    if len(sizes) == 0:
        return counts.astype(np.float64)
    at = np.searchsorted(sizes, counts)
    return np.where(at < len(sizes), sizes[np.minimum(at, len(sizes) - 1)], counts).astype(float)
