"""How many KV blocks fit, the way vLLM's profile run finds out.

vLLM loads the weights, runs one step of `max_num_batched_tokens`, and gives what is left of
`gpu_memory_utilization` times the device memory to the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.hardware import GIB, Gpu
from sim.cost.models import DTYPE_BYTES, ModelShape
from sim.cost.parallel import RankPlan, draft_rank
from sim.engine.config import EngineConfig
from sim.errors import UserError, unknown

# Memory that is neither weights nor activations, GiB: the CUDA context, and the buffers of NCCL and
# of the custom all-reduce. With them, and one more copy of the embedding table (seen in every
# published count, from 0.24 to 1.25 GiB; probably the allocator's, after loading), the KV blocks
# published with the deployments of `ground_truth` come out within 1 %.
CONTEXT_GIB = 0.06
COLLECTIVE_GIB = {1: 0.0, 2: 0.45, 4: 0.58, 8: 0.75}
GRAPH_GIB_PER_SIZE = 0.0085
"""CUDA graphs per capture size and 32 layers; subtracted by vLLM since 0.21."""
GRAPHS_COUNTED_SINCE = (0, 21)


@dataclass(frozen=True)
class Memory:
    """Where one GPU's memory goes, bytes, and the KV blocks that result."""

    requested: float
    weights: float
    activations: float
    other: float
    kv_bytes: float
    block_bytes: float
    num_blocks: int
    """KV blocks per replica, vLLM's null block included."""


def kv_dtype_of(model: ModelShape, engine: EngineConfig) -> str:
    """`bf16`, `fp16`, `fp32` or `fp8`: how the KV cache is stored."""
    name = engine.kv_cache_dtype
    if name == "auto":
        return activation_dtype(model, engine)
    return "fp8" if name.startswith("fp8") else {"float16": "fp16"}.get(name, "bf16")


def activation_dtype(model: ModelShape, engine: EngineConfig) -> str:
    named = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32"}
    if engine.dtype == "auto":
        return "bf16" if model.weight_dtype == "fp32" else model.weight_dtype
    dtype = named.get(engine.dtype, engine.dtype)
    if dtype not in named.values():
        raise unknown("engine dtype", engine.dtype, ["auto", *named, *named.values()])
    return dtype


def plan_memory(
    model: ModelShape,
    gpu: Gpu,
    engine: EngineConfig,
    version: tuple[int, ...] = (0, 33),
    draft: ModelShape | None = None,
) -> Memory:
    """The memory of the fullest GPU of a replica. `draft`: the draft model, whose weights lie
    beside the model's and whose KV lies in the same blocks. Raises UserError when the weights and
    one step do not fit, naming by how many GB, or when not one request of any length would."""
    rank = RankPlan.of(model, engine)
    requested = engine.gpu_memory_utilization * gpu.memory_bytes
    weights = rank.weight_bytes
    activations = _activation_bytes(rank, engine)
    other = CONTEXT_GIB * GIB + model.vision_gib * GIB
    other += rank.vocab * model.hidden * DTYPE_BYTES[activation_dtype(model, engine)]
    other += COLLECTIVE_GIB[min(8, 1 << (rank.tp * rank.pp - 1).bit_length())] * GIB
    if version[:2] >= GRAPHS_COUNTED_SINCE:
        sizes = len(engine.capture_sizes())
        other += GRAPH_GIB_PER_SIZE * GIB * sizes * rank.stage_layers / 32
    block = rank.kv_bytes_per_token(kv_dtype_of(model, engine)) * engine.block_size
    if draft is not None:
        beside = draft_rank(model, draft, engine)
        weights += beside.weight_bytes
        activations = max(activations, _activation_bytes(beside, engine))
        block += beside.kv_bytes_per_token(kv_dtype_of(draft, engine)) * engine.block_size
    left = requested - weights - activations - other
    if left < 2 * block:
        raise UserError(_does_not_fit(model, gpu, engine, requested, weights, left - 2 * block))
    return Memory(requested, weights, activations, other, left, block, int(left // block))


def _activation_bytes(rank: RankPlan, engine: EngineConfig) -> float:
    """Peak of the profile step: the widest layer, or the logits of all sequences."""
    model, tokens = rank.model, engine.max_num_batched_tokens
    width = DTYPE_BYTES[activation_dtype(model, engine)]
    # Two residual streams, and what the MLP's first product and the activation hold at once.
    streams = 2 * tokens * model.hidden * width
    wide = 0.0
    if rank.stage_dense_layers:
        wide = (2 if model.gated else 1) * tokens * model.intermediate / rank.tp * width
    if model.moe is not None:
        share = 1 if rank.expert_parallel else rank.tp
        pairs = tokens * model.moe.topk / rank.ep
        moe = pairs * (3 * model.moe.intermediate / share + model.hidden) * width
        wide = max(wide, moe)
    # The sampler's warm-up holds the logits, their fp32 copy, and the sorted ones with indices.
    logits = min(engine.max_num_seqs, tokens) * model.vocab * (width + 4 + 4)
    return max(streams + wide, logits)


def _does_not_fit(
    model: ModelShape,
    gpu: Gpu,
    engine: EngineConfig,
    requested: float,
    weights: float,
    short: float,
) -> str:
    gpus = engine.world_size
    each = "each of " if gpus > 1 else ""
    return (
        f"{model.name} does not fit {each}{gpus} x {gpu.name}: {-short / 1e9:.1f} GB short per GPU "
        f"(weights {weights / 1e9:.1f} GB of {requested / 1e9:.1f} GB at gpu_memory_utilization "
        f"{engine.gpu_memory_utilization:g}); use more GPUs (tensor_parallel_size), a GPU with "
        f"more memory, quantisation, or a smaller max_num_batched_tokens"
    )
