"""Models small enough for a CPU core, and engine settings that suit them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibrate.engine.architecture import Architecture, architecture
from sim.cost.models import ModelShape, MoeShape
from sim.engine.config import EngineConfig
from sim.errors import UserError, normalise, unknown

SMALL = {
    "small": ModelShape(
        name="small", layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=704,
        vocab=4096, context=4096, source="for checks on a CPU",
    ),
    "small-moe": ModelShape(
        name="small-moe", layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=512,
        vocab=4096, context=4096, moe=MoeShape(experts=8, topk=2, intermediate=512),
        source="for checks on a CPU",
    ),
}  # fmt: skip


def any_architecture(name: str) -> Architecture:
    """A small model, a built-in one, or a folder with a config.json."""
    shape = SMALL.get(normalise(name).replace("moe", "-moe"))
    if shape is not None:
        return Architecture(shape)
    try:
        return architecture(name)
    except UserError as error:
        if "unknown model" in str(error):
            raise UserError(f"{error}; for a CPU there are also {', '.join(SMALL)}") from error
        raise


def engine_config(
    arch: Architecture, device: str, settings: Mapping[str, Any] | None = None
) -> EngineConfig:
    """Settings for the real engine: synchronous steps on one device, which is what it runs.

    On a CPU small budgets, so that a step takes milliseconds; on a GPU vLLM's defaults. Raises
    UserError for unknown settings.
    """
    shape = arch.shape
    given: dict[str, Any] = {"async_scheduling": False, "sliding_window": shape.sliding_window}
    if device == "cpu":
        given |= {
            "max_model_len": min(shape.context, 2048),
            "max_num_batched_tokens": 512,
            "max_num_seqs": 32,
            "num_gpu_blocks": 1025,
            "enforce_eager": True,
        }
    else:
        given |= {"max_model_len": min(shape.context, 8192)}
        given |= {"max_num_batched_tokens": 8192, "max_num_seqs": 256}
    names = EngineConfig.__dataclass_fields__
    for name in settings or {}:
        if name not in names:
            raise unknown("engine setting", name, names)
    return EngineConfig(**{**given, **(settings or {})})
