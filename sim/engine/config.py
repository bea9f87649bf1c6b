"""The engine's settings: vLLM's names, and the defaults of vLLM 0.33.0's OpenAI server on GPUs.

Facts read in vLLM 0.33.0: `config/{scheduler,cache,parallel,speculative,vllm}.py` and
`engine/arg_utils.py` (batch defaults by GPU memory).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.engine.config_check import check
from sim.errors import UserError, unknown

GIB = 1 << 30

EAGLE_METHODS = ("eagle", "eagle3", "mtp")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one replica's engine.

    Values are final: what a user left open is filled by `for_gpu`, which knows the defaults that
    depend on the GPU. Only `num_gpu_blocks` may be open (None) until the memory model has spoken.
    """

    # Parallelism.
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False

    # The model as loaded.
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int = 4096
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """None: vLLM's default list, see `capture_sizes`."""
    max_cudagraph_capture_size: int = 512
    """Ceiling of the default list (1024 on data-centre Blackwell)."""

    # KV cache.
    block_size: int = 16
    """Tokens per KV block."""
    gpu_memory_utilization: float = 0.92
    kv_cache_dtype: str = "auto"
    num_gpu_blocks: int | None = None
    """KV blocks, vLLM's null block included, so one fewer is usable."""
    enable_prefix_caching: bool = True
    sliding_window: int | None = None
    """Attention window in tokens; None is full attention."""

    # Scheduler.
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    max_num_scheduled_tokens: int | None = None
    """A budget below `max_num_batched_tokens`; None means equal to it."""
    max_num_seqs: int = 256
    max_num_active_seqs: int | None = None
    """Admission limit below `max_num_seqs`; None means equal to it."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most tokens one request gets in a step while others are there; 0 is no limit."""
    long_prefill_token_threshold_adaptive: bool = False
    policy: str = "fcfs"
    watermark: float = 0.0
    """Fraction of blocks kept free at admissions while something runs."""
    scheduler_reserve_full_isl: bool = True
    prefill_schedule_interval: int = 1
    async_scheduling: bool = True

    # Speculative decoding.
    num_speculative_tokens: int = 0
    """Drafts per verification, K; 0 is no speculation."""
    spec_method: str = "ngram"
    """vLLM's `speculative_config.method`."""
    spec_model: str | None = None
    """vLLM's `speculative_config.model`: a built-in model or a Hugging Face config.json, whose
    passes are then part of every step and whose weights and KV take memory; None: drafting takes
    neither time nor memory."""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def for_gpu(
        cls,
        gpu_name: str,
        gpu_memory_bytes: float,
        model_max_len: int,
        settings: Mapping[str, Any] | None = None,
    ) -> EngineConfig:
        """Fill what `settings` leaves open as vLLM's OpenAI server does on that GPU.

        `gpu_memory_bytes` is the device's total memory. Raises UserError for unknown settings and
        for values vLLM would refuse.
        """
        given = {k: v for k, v in (settings or {}).items() if v is not None}
        names = [f.name for f in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise unknown("engine setting", name, names)
        given.setdefault("max_model_len", model_max_len)
        tokens, seqs = batch_defaults(gpu_name, gpu_memory_bytes)
        tokens_given, seqs_given = "max_num_batched_tokens" in given, "max_num_seqs" in given
        if not seqs_given:
            given["max_num_seqs"] = seqs
        if not tokens_given:
            if not given.get("enable_chunked_prefill", True):
                tokens = max(tokens, given["max_model_len"])
            tokens = min(tokens, given["max_num_seqs"] * given["max_model_len"])
            given["max_num_batched_tokens"] = tokens
        if not seqs_given:
            given["max_num_seqs"] = min(given["max_num_seqs"], given["max_num_batched_tokens"])
        given.setdefault("max_cudagraph_capture_size", 1024 if _blackwell(gpu_name) else 512)
        if "cudagraph_capture_sizes" in given:
            given["cudagraph_capture_sizes"] = tuple(given["cudagraph_capture_sizes"])
        return cls(**given)

    def with_blocks(self, num_gpu_blocks: int) -> EngineConfig:
        """This configuration with the number of KV blocks (null block included) filled in."""
        return dataclasses.replace(self, num_gpu_blocks=num_gpu_blocks)

    @property
    def num_blocks(self) -> int:
        """KV blocks including the null block; an error while they are unknown."""
        if self.num_gpu_blocks is None:
            raise UserError("num_gpu_blocks is not set: give it, or a GPU and a model to derive it")
        return self.num_gpu_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def token_budget(self) -> int:
        """Tokens a step may schedule."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def max_num_admitted_seqs(self) -> int:
        """Requests that may run at a time."""
        return self.max_num_active_seqs or self.max_num_seqs

    @property
    def speculative(self) -> bool:
        return self.num_speculative_tokens > 0

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots reserved past the scheduled tokens, for the drafter's own KV."""
        keeps_kv = self.spec_method == "draft_model" or self.spec_method in EAGLE_METHODS
        return self.num_speculative_tokens if keeps_kv else 0

    @property
    def draft_slots(self) -> int:
        """Rows a scheduled request takes from the input budget on top of its tokens."""
        return 1 if self.speculative and self.spec_method == "draft_model" else 0

    @property
    def hash_lookahead(self) -> int:
        """Tokens after a block that its hash also covers: an eagle drafter's KV depends on one."""
        return 1 if self.speculative and self.spec_method in EAGLE_METHODS else 0

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight: one per pipeline stage, and one more with async scheduling."""
        return self.pipeline_parallel_size + (1 if self.async_scheduling else 0)

    @property
    def max_window_blocks(self) -> int | None:
        """Most KV blocks a sequence holds under a sliding window; None without one.

        The window, what is in flight, and one block because a window may start inside a block.
        """
        if self.sliding_window is None:
            return None
        in_flight = self.max_concurrent_batches * self.max_num_batched_tokens
        tokens = min(self.sliding_window - 1 + in_flight, self.max_model_len)
        return -(-tokens // self.block_size) + 1

    @property
    def decode_query_len(self) -> int:
        return 1 + self.num_speculative_tokens

    @property
    def world_size(self) -> int:
        """GPUs of one replica (data-parallel ranks not counted)."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def capture_sizes(self) -> tuple[int, ...]:
        """Batch sizes, in tokens and ascending, for which CUDA graphs exist; () when eager."""
        if self.enforce_eager:
            return ()
        limit = self.max_num_batched_tokens
        if self.cudagraph_capture_sizes is not None:
            return tuple(sorted({n for n in self.cudagraph_capture_sizes if n <= limit}))
        query = self.decode_query_len
        ceiling = min(self.max_num_seqs * query * 2, self.max_cudagraph_capture_size)
        decode_sizes: set[int] = set()
        if query > 1:
            counts = _graph_grid(min(self.max_num_seqs, self.max_cudagraph_capture_size))
            counts.add(min(self.max_num_seqs, self.max_cudagraph_capture_size))
            decode_sizes = {n * query for n in counts if n * query <= ceiling}
        elif self.max_num_seqs <= ceiling:
            decode_sizes = {self.max_num_seqs}
        ceiling = min(limit, ceiling)
        sizes = _graph_grid(ceiling) | {n for n in decode_sizes if n <= limit}
        if limit <= ceiling:
            sizes.add(limit)
        return tuple(sorted(sizes))


def batch_defaults(gpu_name: str, gpu_memory_bytes: float) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of vLLM's OpenAI server on a GPU."""
    name = gpu_name.lower()
    if gpu_memory_bytes >= 160 * GIB:
        return 16384, 1024
    # A100s keep the small defaults whatever their memory; so does GB10, which has the memory of a
    # large GPU but not its compute.
    if gpu_memory_bytes >= 70 * GIB and "a100" not in name and "gb10" not in name:
        return 8192, 1024
    return 2048, 256


def _blackwell(gpu_name: str) -> bool:
    """Data-centre Blackwell (compute capability 10.x)."""
    name = gpu_name.lower()
    return any(chip in name for chip in ("b100", "b200", "b300"))


def _graph_grid(ceiling: int) -> set[int]:
    """1, 2, 4, then steps of 8 below 256 and of 16 from there."""
    sizes = {n for n in (1, 2, 4) if n <= ceiling}
    sizes.update(range(8, min(ceiling + 1, 256), 8))
    sizes.update(range(256, ceiling + 1, 16))
    return sizes
