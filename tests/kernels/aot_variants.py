"""The launches that must compile: each is a wrapper called on meta tensors, shapes of real
models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.activation import silu_and_mul
from kernels.blocks import copy_blocks
from kernels.flash_prefill import flash_prefill
from kernels.fused_moe import fused_moe
from kernels.moe_router import Routing, route
from kernels.norm import rms_norm
from kernels.paged_attention import paged_decode
from kernels.rope import rope_and_cache
from kernels.sampling import greedy, probabilities, sample
from kernels.speculative import verify_drafts

BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor of this shape without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cache_of(head_dim: int, kv_heads: int, dtype: torch.dtype, block: int = 16) -> dict[str, Any]:
    cache = meta(8192, block, kv_heads, head_dim, dtype=dtype)
    scale = meta(kv_heads, dtype=F32) if dtype == torch.float8_e4m3fn else None
    return {"k_cache": cache, "v_cache": cache, "k_scale": scale, "v_scale": scale}


def decode(
    head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype = BF16, fp8: bool = False,
    drafts: int = 0,
    window: int | None = None,
) -> Callable[[], Any]:  # fmt: skip
    def call() -> None:
        tokens = 32 * (1 + drafts)
        paged_decode(
            meta(tokens, heads, head_dim, dtype=dtype),
            **cache_of(head_dim, kv_heads, torch.float8_e4m3fn if fp8 else dtype),
            block_table=meta(32, 512, dtype=I32), seq_lens=meta(32, dtype=I32), max_seq_len=8192,
            window=window,
            query_start=meta(33, dtype=I32) if drafts else None, max_query_len=1 + drafts,
        )  # fmt: skip

    return call


def prefill(
    head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype = BF16, paged: bool = True,
    fp8: bool = False,
    window: int | None = None, longest: int = 8192,
) -> Callable[[], Any]:  # fmt: skip
    def call() -> None:
        query, start = meta(16384, heads, head_dim, dtype=dtype), meta(9, dtype=I32)
        if not paged:
            key = meta(16384, kv_heads, head_dim, dtype=dtype)
            flash_prefill(query, key, key, start, longest, window=window)
            return
        cache = cache_of(head_dim, kv_heads, torch.float8_e4m3fn if fp8 else dtype)
        flash_prefill(
            query, cache.pop("k_cache"), cache.pop("v_cache"), start, longest, **cache,
            block_table=meta(8, 512, dtype=I32), seq_lens=meta(8, dtype=I32), window=window,
        )  # fmt: skip

    return call


def rope(
    head_dim: int, heads: int, kv_heads: int, fp8: bool = False, rotary_dim: int = 0
) -> Callable[[], Any]:
    def call() -> None:
        key = meta(4096, kv_heads, head_dim)
        rope_and_cache(
            meta(4096, heads, head_dim), key, key, meta(8192, rotary_dim or head_dim, dtype=F32),
            meta(4096, dtype=I64), slots=meta(4096, dtype=I64),
            **cache_of(head_dim, kv_heads, torch.float8_e4m3fn if fp8 else BF16),
        )  # fmt: skip

    return call


def moe(
    tokens: int,
    experts: int,
    top_k: int,
    dim: int,
    inner: int,
    dtype: torch.dtype = BF16,
    shared: int = 0,
) -> Callable[[], Any]:
    def call() -> None:
        routing = Routing(
            meta(tokens, top_k, dtype=F32), meta(tokens, top_k, dtype=I32), None, None
        )
        x = meta(tokens, dim, dtype=dtype)
        options: dict[str, Any] = {}
        if shared:
            options = {
                "shared_gate_up": meta(2 * shared, dim),
                "shared_down": meta(dim, shared),
                "residual": x,
            }
        fused_moe(
            x,
            meta(experts, 2 * inner, dim, dtype=dtype),
            meta(experts, dim, inner, dtype=dtype),
            routing,
            **options,
        )

    return call


VARIANTS: dict[str, Callable[[], Any]] = {
    "decode-D64-G4-bf16": decode(64, 32, 8),
    "decode-D80-G1-fp16": decode(80, 32, 32, F16),
    "decode-D128-G4-bf16": decode(128, 32, 8),
    "decode-D128-G8-bf16-drafts4": decode(128, 64, 8, drafts=4),
    "decode-D128-G8-bf16-drafts15": decode(128, 64, 8, drafts=15),
    "decode-D128-G4-fp8": decode(128, 32, 8, fp8=True),
    "decode-D128-G7-bf16-window": decode(128, 28, 4, window=4096),
    "decode-D128-G4-fp32": decode(128, 32, 8, F32),
    "decode-D256-G2-bf16": decode(256, 16, 8),
    "prefill-D64-G4-bf16": prefill(64, 32, 8),
    "prefill-D96-G1-bf16": prefill(96, 32, 32),
    "prefill-D128-G4-bf16": prefill(128, 32, 8),
    "prefill-D128-G4-bf16-contiguous": prefill(128, 32, 8, paged=False),
    "prefill-D128-G4-bf16-short": prefill(128, 32, 8, longest=16),
    "prefill-D128-G7-bf16-window": prefill(128, 28, 4, window=4096),
    "prefill-D128-G4-fp8": prefill(128, 32, 8, fp8=True),
    "prefill-D128-G4-fp32": prefill(128, 32, 8, F32),
    "prefill-D256-G2-bf16": prefill(256, 16, 8),
    "norm-4096-bf16": lambda: rms_norm(meta(4096, 4096), meta(4096)),
    "norm-5120-bf16-residual": lambda: rms_norm(
        meta(4096, 5120), meta(5120), residual=meta(4096, 5120)
    ),
    "norm-16384-fp16-residual": lambda: rms_norm(
        meta(64, 16384, dtype=F16), meta(16384, dtype=F16), residual=meta(64, 16384, dtype=F16)
    ),
    "norm-heads-D128-bf16": lambda: rms_norm(meta(4096, 32, 128), meta(128)),
    "silu-14336-bf16": lambda: silu_and_mul(meta(4096, 28672)),
    "rope-D128-G4-bf16": rope(128, 32, 8),
    "rope-D80-G1-rotary32-bf16": rope(80, 32, 32, rotary_dim=32),
    "rope-D128-G4-fp8": rope(128, 32, 8, fp8=True),
    "route-E128-k8-bf16-losses": lambda: route(meta(4096, 128), 8, losses=True),
    "route-E8-k2-noisy": lambda: route(
        meta(4096, 8), 2, method="noisy", noise=meta(4096, 8), noise_logits=meta(4096, 8)
    ),
    "route-E512-k10-bf16": lambda: route(meta(4096, 512), 10),
    "moe-T1-E8-k2-bf16": moe(1, 8, 2, 4096, 14336),
    "moe-T256-E128-k8-bf16": moe(256, 128, 8, 2048, 768),
    "moe-T512-E64-k6-bf16-shared": moe(512, 64, 6, 2048, 1408, shared=2816),
    "moe-T4096-E8-k2-bf16": moe(4096, 8, 2, 4096, 14336),
    "moe-T16384-E512-k10-fp16": moe(16384, 512, 10, 2048, 512, F16),
    "moe-T64-E8-k2-fp32": moe(64, 8, 2, 1024, 1000, F32),
    "greedy-V151936-bf16": lambda: greedy(meta(64, 151936)),
    "sample-V128256-fp32": lambda: sample(
        meta(64, 128256, dtype=F32),
        meta(64, dtype=F32),
        meta(64, dtype=F32),
        top_k=meta(64, dtype=I32),
        top_p=meta(64, dtype=F32),
    ),
    "probabilities-V128256-bf16": lambda: probabilities(
        meta(64, 128256), meta(64, dtype=F32), top_k=meta(64, dtype=I32), top_p=meta(64, dtype=F32)
    ),
    "verify-K4-V128256": lambda: verify_drafts(
        meta(64, 4, dtype=I64),
        meta(64, 4, 128256, dtype=F32),
        meta(64, 5, 128256, dtype=F32),
        meta(64, 4, dtype=F32),
        meta(64, dtype=F32),
    ),
    "verify-K1-V32000-ngram": lambda: verify_drafts(
        meta(64, 1, dtype=I32),
        None,
        meta(64, 2, 32000, dtype=F32),
        meta(64, 1, dtype=F32),
        meta(64, dtype=F32),
    ),
    "copy-blocks-bf16": lambda: copy_blocks([meta(8192, 16, 8, 128)], [(0, 1)]),
}

# On other chips these compile what another variant compiles there already, or nearly.
HOPPER_ONLY = frozenset(
    {
        "decode-D80-G1-fp16",
        "decode-D128-G8-bf16-drafts15",
        "decode-D128-G4-fp32",
        "prefill-D96-G1-bf16",
        "prefill-D128-G4-bf16-contiguous",
        "prefill-D128-G4-fp32",
        "norm-5120-bf16-residual",
        "norm-heads-D128-bf16",
        "rope-D80-G1-rotary32-bf16",
        "route-E8-k2-noisy",
        "route-E512-k10-bf16",
        "moe-T1-E8-k2-bf16",
        "moe-T16384-E512-k10-fp16",
        "moe-T64-E8-k2-fp32",
        "verify-K1-V32000-ngram",
    }
)
ARCHS = (80, 89, 90)
PAIRS = [
    (name, arch) for name in VARIANTS for arch in ARCHS if arch == 90 or name not in HOPPER_ONLY
]
