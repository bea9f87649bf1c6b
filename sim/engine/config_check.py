"""What vLLM refuses of an engine's settings is refused here, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sim.errors import UserError, unknown

if TYPE_CHECKING:
    from sim.engine.config import EngineConfig

POLICIES = ("fcfs", "priority")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp", "medusa")
"""Methods whose place in the scheduler is known. Ngram drafts on the host; a draft model and the
eagle family keep KV of their own, one slot ahead per draft; medusa's heads keep none."""
SPECULATIVE_MODELS = ("draft_model", "eagle", "eagle3", "mtp")
"""Those that draft with a decoder of their own, one pass per draft."""

_MOST = (1 << 31) - 1
_FROM_ONE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "max_model_len",
    "block_size",
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "prefill_schedule_interval",
    "max_cudagraph_capture_size",
    "sliding_window",
)
_BOUNDS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(_FROM_ONE, (1, _MOST)),
    "long_prefill_token_threshold": (0, _MOST),
    "num_speculative_tokens": (0, 1024),
}
"""Least and most of whole numbers; those that may be open may be None."""


def check(c: EngineConfig) -> None:
    """UserError for the first setting that cannot be, or that contradicts another."""

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise UserError(f"engine settings: {message}")

    for name, (least, most) in _BOUNDS.items():
        value = getattr(c, name)
        if value is not None:
            need(isinstance(value, int), f"{name} must be a whole number, got {value!r}")
            need(value >= least, f"{name} must be at least {least}, got {value!r}")
            need(value <= most, f"{name} must be at most {most}, got {value!r}")
    for size in c.cudagraph_capture_sizes or ():
        need(size >= 1, f"cudagraph_capture_sizes must be at least 1, got {size!r}")
    need(
        0 < c.gpu_memory_utilization <= 1,
        f"gpu_memory_utilization must be in (0, 1], got {c.gpu_memory_utilization!r}",
    )
    need(0 <= c.watermark < 1, f"watermark must be in [0, 1), got {c.watermark!r}")
    if c.policy not in POLICIES:
        raise unknown("engine policy", c.policy, POLICIES)
    if c.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise unknown("kv_cache_dtype", c.kv_cache_dtype, KV_CACHE_DTYPES)
    if c.spec_method not in SPECULATIVE_METHODS:
        raise unknown("speculative method", c.spec_method, SPECULATIVE_METHODS)
    need(
        c.spec_model is None or c.spec_method in SPECULATIVE_MODELS,
        f"spec_model is for spec_method {', '.join(SPECULATIVE_MODELS)}, not for {c.spec_method}",
    )
    need(
        c.spec_model is None or c.speculative,
        "spec_model needs num_speculative_tokens: how many drafts it makes",
    )
    need(
        c.num_gpu_blocks is None or 2 <= c.num_gpu_blocks <= _MOST,
        f"num_gpu_blocks must be at least 2 (one is the null block) and at most {_MOST}, got "
        f"{c.num_gpu_blocks!r}",
    )
    need(
        c.max_num_batched_tokens >= c.max_num_seqs,
        f"max_num_batched_tokens ({c.max_num_batched_tokens}) must not be smaller than "
        f"max_num_seqs ({c.max_num_seqs})",
    )
    need(
        c.enable_chunked_prefill or c.max_num_batched_tokens >= c.max_model_len,
        f"without chunked prefill max_num_batched_tokens ({c.max_num_batched_tokens}) must not be "
        f"smaller than max_model_len ({c.max_model_len})",
    )
    need(
        c.max_num_active_seqs is None or c.max_num_active_seqs <= c.max_num_seqs,
        f"max_num_active_seqs ({c.max_num_active_seqs}) must not exceed max_num_seqs "
        f"({c.max_num_seqs})",
    )
    need(
        c.long_prefill_token_threshold <= c.max_model_len,
        f"long_prefill_token_threshold ({c.long_prefill_token_threshold}) must not exceed "
        f"max_model_len ({c.max_model_len})",
    )
    need(
        not c.speculative or c.max_num_batched_tokens > c.num_lookahead_tokens,
        f"max_num_batched_tokens ({c.max_num_batched_tokens}) leaves no room for "
        f"{c.num_lookahead_tokens} lookahead tokens",
    )
