"""What the decoder must know of a model beyond the sizes that its cost depends on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.cost.hf_config import from_config
from sim.cost.models import ModelShape, model
from sim.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
"""Values of `model_type` in a Hugging Face config that this decoder computes."""


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama family: RMSNorm, RoPE, GQA, SwiGLU or experts behind a router."""

    shape: ModelShape
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """Hugging Face's `rope_scaling`; `llama3` and `linear` are known, {} is none."""
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    renormalise: bool = True
    """Divide the weights of the chosen experts by their sum."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a sigmoid gate (Qwen2-MoE)."""
    eos: tuple[int, ...] = ()
    """Token ids that end a text."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.shape.heads // self.shape.kv_heads

    def rope_frequencies(self) -> list[float]:
        """Radians per position of each pair of a head's dimensions, [head_dim / 2]."""
        dim = self.shape.head_dim
        plain = [self.rope_theta ** (-2.0 * i / dim) for i in range(dim // 2)]
        kind = self.rope_scaling.get("rope_type", self.rope_scaling.get("type"))
        if kind in (None, "default"):
            return plain
        factor = float(self.rope_scaling.get("factor", 1.0))
        if kind == "linear":
            return [f / factor for f in plain]
        return [_llama3(f, factor, self.rope_scaling) for f in plain]


def _llama3(frequency: float, factor: float, scaling: Mapping[str, Any]) -> float:
    """Llama 3.1's scaling: long wavelengths slow down by `factor`, short ones stay."""
    low = float(scaling.get("low_freq_factor", 1.0))
    high = float(scaling.get("high_freq_factor", 4.0))
    trained = float(scaling.get("original_max_position_embeddings", 8192))
    turns = trained * frequency / (2 * math.pi)
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def architecture_of(shape: ModelShape) -> Architecture:
    """The decoder of a built-in model, for random weights. UserError for what it cannot compute."""
    unsupported = {
        "multi-head latent attention": shape.mla is not None,
        "an MLP without a gate": not shape.gated,
        "learned positions": shape.learned_positions,
        "attention beside the MLP": shape.parallel_attention,
        "chunked local attention": shape.attention_chunk is not None,
        "quantised weights": shape.quantization is not None,
        "sliding windows in some layers only": shape.sliding_layers not in (None, shape.layers),
        "odd head dimensions": shape.head_dim % 2 == 1,
    }
    for what, present in unsupported.items():
        if present:
            raise UserError(
                f"the real engine cannot run {shape.name}: it has {what}; it runs decoders of the "
                f"families {', '.join(FAMILIES)}"
            )
    if shape.moe is not None and (shape.moe.dense_layers or shape.moe.every != 1):
        raise UserError(f"the real engine cannot run {shape.name}: only some layers have experts")
    qwen2 = "qwen2" in shape.name.lower() or "qwen-" in shape.name.lower()
    return Architecture(shape, rope_theta=500000.0 if shape.context > 8192 else 10000.0,
                        norm_eps=1e-6, qkv_bias=qwen2)  # fmt: skip


def architecture(name: str) -> Architecture:
    """The decoder of a built-in model's name, or of a folder with a Hugging Face `config.json`."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{name}: no config.json in this model folder")
    if path.is_dir() or path.suffix == ".json":
        return read_architecture(path)
    return architecture_of(model(name))


def read_architecture(path: Path) -> Architecture:
    """The decoder described by a Hugging Face `config.json`, or by the folder it is in."""
    file = path / "config.json" if path.is_dir() else path
    shape = from_config(file)
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        raise UserError(
            f"{file}: the real engine cannot run model_type {kind!r}; it runs {', '.join(FAMILIES)}"
        )
    base = architecture_of(shape)
    scaling = config.get("rope_scaling") or {}
    rope = config.get("rope_parameters") or {}
    kind_of_scaling = {**rope, **scaling}.get("rope_type", scaling.get("type"))
    if kind_of_scaling not in (None, "default", "linear", "llama3"):
        raise UserError(f"{file}: rope_scaling {kind_of_scaling!r} is not supported")
    eos = config.get("eos_token_id")
    return Architecture(
        base.shape,
        rope_theta=float(config.get("rope_theta", rope.get("rope_theta", 10000.0))),
        rope_scaling=scaling or ({} if kind_of_scaling in (None, "default") else rope),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=bool(config.get("attention_bias", kind in ("qwen2", "qwen2_moe"))),
        renormalise=kind == "mixtral" or bool(config.get("norm_topk_prob", False)),
        shared_gate=kind == "qwen2_moe",
        eos=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )
