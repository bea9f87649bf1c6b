"""Engine settings for running the real engine outside a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibrate.engine.architecture import Architecture
from sim.engine.config import EngineConfig
from sim.errors import unknown


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
