"""What one GPU of a replica computes and stores under a parallel plan, as vLLM divides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sim.cost.models import DTYPE_BYTES, ModelShape, mlp_params
from sim.engine.config import EngineConfig
from sim.errors import UserError

VOCAB_PADDING = 64
"""vLLM pads vocabularies to a multiple of this before dividing them."""


@dataclass(frozen=True)
class Linear:
    """One matrix product per layer: [tokens, k] x [k, n] on this GPU."""

    name: str
    n: int
    k: int
    layers: int
    """How many layers of the stage have it."""
    quantized: bool = True
    """False: in 16 bits even in a quantised model."""


@dataclass(frozen=True)
class RankPlan:
    """The share of one GPU: `tp` slices every layer, `pp` divides the layers, `ep` (expert
    parallel over tp * dp ranks) gives whole experts to each GPU instead of slices of all."""

    model: ModelShape
    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @classmethod
    def of(cls, model: ModelShape, engine: EngineConfig) -> RankPlan:
        """Raises UserError where the model cannot be divided so."""
        plan = cls(
            model,
            engine.tensor_parallel_size,
            engine.pipeline_parallel_size,
            engine.data_parallel_size,
            engine.enable_expert_parallel and model.moe is not None,
        )
        tp, pp = plan.tp, plan.pp
        if model.heads % tp:
            raise UserError(
                f"{model.name}: tensor_parallel_size {tp} does not divide its {model.heads} "
                f"attention heads; choose a divisor"
            )
        if model.kv_heads % tp and tp % model.kv_heads:
            raise UserError(
                f"{model.name}: tensor_parallel_size {tp} and its {model.kv_heads} KV heads do "
                f"not divide each other"
            )
        if engine.enable_expert_parallel and model.moe is None:
            raise UserError(f"{model.name} has no experts: leave enable_expert_parallel out")
        if plan.dp > 1 and not plan.expert_parallel:
            raise UserError(
                f"data_parallel_size {plan.dp} divides experts and needs enable_expert_parallel; "
                f"for {plan.dp} copies of {model.name} use {plan.dp} replicas"
            )
        if model.moe is not None and plan.ep > model.moe.experts:
            raise UserError(
                f"{model.name}: {plan.ep} expert-parallel GPUs are more than its "
                f"{model.moe.experts} experts"
            )
        if pp > model.layers:
            raise UserError(
                f"{model.name}: pipeline_parallel_size {pp} exceeds its {model.layers} layers"
            )
        return plan

    @property
    def ep(self) -> int:
        return self.tp * self.dp if self.expert_parallel else 1

    @property
    def stage_layers(self) -> int:
        """Layers of the largest pipeline stage."""
        return -(-self.model.layers // self.pp)

    @property
    def stage_moe_layers(self) -> int:
        return min(self.stage_layers, -(-self.model.moe_layers // self.pp))

    @property
    def stage_dense_layers(self) -> int:
        return self.stage_layers - self.stage_moe_layers

    @property
    def heads(self) -> int:
        return self.model.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """KV heads on this GPU; replicated when there are fewer of them than GPUs."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def vocab(self) -> int:
        padded = -(-self.model.vocab // VOCAB_PADDING) * VOCAB_PADDING
        return -(-padded // self.tp)

    @cached_property
    def linears(self) -> Sequence[Linear]:
        """The matrix products of one step, without lm_head and routed experts."""
        model, layers = self.model, self.stage_layers
        found = list(self._attention_linears(layers))
        wide = 2 if model.gated else 1
        if self.stage_dense_layers:
            width = -(-model.intermediate // self.tp)
            found += [
                Linear("gate_up", wide * width, model.hidden, self.stage_dense_layers),
                Linear("down", model.hidden, width, self.stage_dense_layers),
            ]
        if model.moe is not None:
            moe_layers = self.stage_moe_layers
            found.append(Linear("router", model.moe.experts, model.hidden, moe_layers, False))
            if model.moe.shared_intermediate:
                width = -(-model.moe.shared_intermediate // self.tp)
                found += [
                    Linear("shared_gate_up", wide * width, model.hidden, moe_layers),
                    Linear("shared_down", model.hidden, width, moe_layers),
                ]
        return tuple(found)

    def _attention_linears(self, layers: int) -> Sequence[Linear]:
        model = self.model
        if model.mla is None:
            hd, quantized = model.head_dim, model.quantized_attention
            n = (self.heads + 2 * self.kv_heads) * hd
            return (
                Linear("qkv", n, model.hidden, layers, quantized),
                Linear("o", model.hidden, self.heads * hd, layers, quantized),
            )
        mla = model.mla
        latent = mla.kv_lora + mla.rope_dim
        q_out = self.heads * (mla.nope_dim + mla.rope_dim)
        kv_b = Linear("kv_b", self.heads * (mla.nope_dim + mla.v_dim), mla.kv_lora, layers)
        out = Linear("o", model.hidden, self.heads * mla.v_dim, layers)
        if mla.q_lora is None:
            return (Linear("q_kv_a", q_out + latent, model.hidden, layers), kv_b, out)
        return (
            Linear("q_kv_a", mla.q_lora + latent, model.hidden, layers),
            Linear("q_b", q_out, mla.q_lora, layers),
            kv_b,
            out,
        )

    @cached_property
    def weight_bytes(self) -> float:
        """Weights on the GPU that holds most, bytes (the last or only pipeline stage)."""
        model = self.model
        quantised = DTYPE_BYTES[model.quantization or model.weight_dtype]
        plain = DTYPE_BYTES[model.weight_dtype]
        # Checkpoints in mxfp4 quantise only the experts.
        linear = plain if model.quantization == "mxfp4" else quantised
        total = sum(x.n * x.k * x.layers * (linear if x.quantized else plain) for x in self.linears)
        if model.moe is not None:
            share = self.ep if self.expert_parallel else self.tp
            expert = mlp_params(model.hidden, model.moe.intermediate, model.moe.gated)
            total += self.stage_moe_layers * model.moe.experts * expert / share * quantised
        tables = (1 if model.tied_embeddings else 2) if self.pp == 1 else 1
        positions = model.context * model.hidden if model.learned_positions else 0
        total += (tables * self.vocab * model.hidden + positions) * plain
        return total

    def kv_bytes_per_token(self, kv_dtype: str) -> float:
        """KV cache of one token on this GPU, bytes."""
        width, layers = DTYPE_BYTES[kv_dtype], self.stage_layers
        if self.model.mla is not None:
            return layers * (self.model.mla.kv_lora + self.model.mla.rope_dim) * width
        return 2 * layers * self.kv_heads * self.model.head_dim * width


def draft_engine(engine: EngineConfig, draft: ModelShape) -> EngineConfig:
    """The settings under which the draft model runs: the target's, without its pipeline,
    quantisation and attention window."""
    return replace(
        engine,
        pipeline_parallel_size=1,
        enable_expert_parallel=engine.enable_expert_parallel and draft.moe is not None,
        quantization=None,
        sliding_window=None,
    )


def draft_rank(model: ModelShape, draft: ModelShape, engine: EngineConfig) -> RankPlan:
    """One GPU's share of the draft model. Raises UserError where it cannot draft for `model`."""
    if draft.vocab != model.vocab:
        raise UserError(
            f"the draft model {draft.name} has another vocabulary than {model.name} "
            f"({draft.vocab} and {model.vocab} tokens); choose one of its family"
        )
    return RankPlan.of(replace(draft, top_p=False), draft_engine(engine, draft))
