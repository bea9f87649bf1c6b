"""What serves an experiment: its model, GPU, engine settings and cost model, from the entry alone.

Nothing here depends on which experiment it is: the same rules fill what every entry leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calibrate.validation.experiments import Experiment, Json, stated_bool, stated_int
from sim.cost.build import build_cost_model
from sim.cost.hardware import Gpu, gpu
from sim.cost.host import parse_version
from sim.cost.interface import CostModel
from sim.cost.memory import kv_dtype_of, plan_memory
from sim.cost.models import ModelShape, MoeShape, model
from sim.cost.offload import OffloadingCost, cpu_blocks
from sim.cost.step import StepCost
from sim.engine.config import EngineConfig
from sim.errors import UserError

VERSION = "0.33.0"
"""Assumed where an entry names none."""
ASYNC_SINCE = (0, 14)
"""vLLM schedules asynchronously by default since then."""
COLD_EXPERTS_IN = (0, 15)
"""The only version with open runs of mixture-of-experts models that a load test met cold."""


@dataclass(frozen=True)
class Deployment:
    """One experiment's server, ready to be built."""

    model: ModelShape
    gpu: Gpu
    engine: EngineConfig
    version: str
    frontend: str
    kv_blocks_from: str
    """`stated`, `sibling` (another run of the same card and model) or `computed`."""
    replicas: int

    cpu_blocks: int | None
    """KV blocks in CPU memory, where the engine offloads to it."""
    cold_experts: bool
    """Whether expert kernels are compiled while the first requests wait."""

    def step_cost(self) -> StepCost:
        """What a step costs, offloading left out."""
        return build_cost_model(
            self.model,
            self.gpu,
            self.engine,
            engine_version=self.version,
            frontend=self.frontend,
        )

    def cost_model(self) -> CostModel:
        cost = self.step_cost()
        return cost if self.cpu_blocks is None else OffloadingCost(cost, self.cpu_blocks)


def deployment(experiment: Experiment, others: Sequence[Experiment] = ()) -> Deployment:
    """The server of `experiment`. `others` are the entries of the same file: one that ran the same
    model on the same cards with the same memory may state the KV blocks that this one does not."""
    version = experiment.version or VERSION
    card = gpu(experiment.gpu)
    frontend = frontend_of(experiment)
    shape = model_shape(experiment.model)
    if frontend == "in-process":
        # Sampling parameters come from the caller there, not from the model's generation_config.
        shape = replace(shape, top_p=False)
    engine = engine_config(experiment, shape, card, version)
    blocks, source = experiment.kv_blocks, "stated"
    if blocks is None:
        blocks, source = _sibling_blocks(experiment, others), "sibling"
    if blocks is None:
        memory = plan_memory(shape, card, engine, parse_version(version))
        blocks, source = memory.num_blocks, "computed"
    return Deployment(
        model=shape,
        gpu=card,
        engine=engine.with_blocks(blocks),
        version=version,
        frontend=frontend,
        kv_blocks_from=source,
        replicas=experiment.dp,
        cpu_blocks=_cpu_blocks(experiment, shape, engine),
        cold_experts=_compiles_experts(shape, version),
    )


def _compiles_experts(shape: ModelShape, version: str) -> bool:
    triton = shape.moe is not None and shape.quantization is None
    return triton and parse_version(version)[:2] == COLD_EXPERTS_IN


def _cpu_blocks(experiment: Experiment, shape: ModelShape, engine: EngineConfig) -> int | None:
    if not stated_bool(experiment.engine.get("cpu_kv_offload"), False):
        return None
    stated = stated_int(experiment.engine.get("cpu_kv_blocks"))
    per_token = shape.kv_bytes_per_token(kv_dtype_of(shape, engine))
    return stated or cpu_blocks(per_token, engine.block_size)


def frontend_of(experiment: Experiment) -> str:
    """What stands between client and engine: a network, only HTTP, or nothing."""
    if experiment.measured_from_queue:
        return "in-process"
    return "network" if "GKE" in experiment.gpu else "http"


def engine_config(
    experiment: Experiment, shape: ModelShape, card: Gpu, version: str
) -> EngineConfig:
    """The engine arguments of the entry, with vLLM's defaults for what it leaves open."""
    given = experiment.engine
    context = stated_int(given.get("max_model_len"))
    settings: dict[str, Any] = {
        "tensor_parallel_size": experiment.tp,
        "pipeline_parallel_size": experiment.pp,
        "data_parallel_size": experiment.dp if _shares_experts(experiment) else 1,
        "enable_expert_parallel": _shares_experts(experiment),
        "max_model_len": min(context, shape.context) if context else shape.context,
        "max_num_batched_tokens": stated_int(given.get("max_num_batched_tokens")),
        "max_num_seqs": stated_int(given.get("max_num_seqs")),
        "block_size": stated_int(given.get("block_size"), 16),
        "gpu_memory_utilization": given.get("gpu_memory_utilization") or 0.9,
        "enable_prefix_caching": stated_bool(given.get("prefix_caching"), True),
        "enable_chunked_prefill": stated_bool(given.get("chunked_prefill"), True),
        "enforce_eager": stated_bool(given.get("enforce_eager"), False),
        "async_scheduling": parse_version(version) >= ASYNC_SINCE,
        "sliding_window": shape.sliding_window if shape.sliding_layers is None else None,
    }
    return EngineConfig.for_gpu(card.name, card.memory_bytes, shape.context, settings)


def _shares_experts(experiment: Experiment) -> bool:
    """Are the experts divided among the GPUs? Only where the entry gives a number."""
    return bool(experiment.model.get("moe")) and (experiment.ep or 1) > 1


def model_shape(fields: Json) -> ModelShape:
    """The built-in model of that name with the entry's numbers; else from those alone."""
    known = {
        name: fields[name]
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
        if fields.get(name) is not None
    }
    try:
        return replace(model(fields["hf"]), **known)
    except UserError:
        pass
    try:
        return ModelShape(
            name=fields["hf"].rsplit("/", 1)[-1],
            context=int(fields.get("context") or 32768),
            moe=_moe(fields.get("moe")),
            weight_dtype=fields.get("weights_dtype") or "bf16",
            quantization="fp8" if "fp8" in str(fields.get("quant")).lower() else None,
            source="experiment",
            **known,
        )
    except TypeError as error:
        raise UserError(
            f"model {fields['hf']}: not built in, and the entry lacks {error}"
        ) from None


def _moe(moe: Mapping[str, Any] | None) -> MoeShape | None:
    if not moe:
        return None
    return MoeShape(
        experts=moe["experts"],
        topk=moe["topk"],
        intermediate=moe["expert_intermediate"],
        shared_intermediate=moe.get("shared_intermediate") or 0,
        every=moe.get("every_n_layers") or 1,
    )


def _sibling_blocks(experiment: Experiment, others: Sequence[Experiment]) -> int | None:
    """KV blocks another run of the same engine on the same cards logged."""

    def memory_of(e: Experiment) -> tuple[object, ...]:
        names = ("gpu_memory_utilization", "max_num_batched_tokens", "block_size")
        ranks = (e.tp, e.pp, e.dp if _shares_experts(e) else 1)
        return (e.model["hf"], e.gpu, *ranks, e.version, *(e.engine.get(n) for n in names))

    mine = memory_of(experiment)
    found = (e.kv_blocks for e in others if e.kv_blocks is not None and memory_of(e) == mine)
    return next(found, None)
