"""Model shapes: the numbers of an architecture that its cost depends on.

Built in for the models of `data/models.json`; any other is read from a Hugging Face `config.json`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from sim.errors import UserError, normalise, unknown

DTYPE_BYTES: Mapping[str, float] = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_block": 1, "int8": 1,
    "int4": 0.53, "awq": 0.53, "gptq": 0.53, "mxfp4": 0.53, "nvfp4": 0.5625,
}  # fmt: skip
"""Bytes per weight with its scales (4-bit: one 16-bit scale per 128 or 32 weights)."""


@dataclass(frozen=True)
class MoeShape:
    """Experts of a mixture-of-experts model."""

    experts: int
    topk: int
    intermediate: int
    """Width of one routed expert."""
    shared_intermediate: int = 0
    """Width of all shared experts together; 0: none."""
    dense_layers: int = 0
    """Leading layers with a dense MLP instead of experts."""
    every: int = 1
    """Every how many layers experts come (2: every other layer)."""
    gated: bool = True


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (DeepSeek-V2/V3)."""

    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_lora: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """Architecture of one model. Sizes are in elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    """`max_position_embeddings`: the longest context, tokens."""
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    gated: bool = True
    """Three MLP matrices (SwiGLU) instead of two."""
    tied_embeddings: bool = False
    learned_positions: bool = False
    parallel_attention: bool = False
    """Attention and MLP side by side (Falcon): one all-reduce and one norm per layer."""
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: int | None = None
    """Layers with the window; None: all of them, where there is a window."""
    attention_chunk: int | None = None
    """Llama-4's local attention: its chunk length, in `chunked_layers` of the layers."""
    chunked_layers: int = 0
    weight_dtype: str = "bf16"
    quantization: str | None = None
    """`fp8` (per channel), `fp8_block`, `int8`, `int4` (AWQ, GPTQ), `mxfp4`, `nvfp4`; or None."""
    quantized_attention: bool = True
    """Whether `quantization` covers the attention's matrices too (not in the FP8 Llama 4)."""
    top_p: bool = False
    """The model's generation_config asks for top-p sampling, which vLLM's server adopts."""
    vision_gib: float = 0.0
    """Memory of a vision tower that text does not use: weights and profiled activations, GiB."""
    source: str = ""

    @property
    def moe_layers(self) -> int:
        if self.moe is None:
            return 0
        return (self.layers - self.moe.dense_layers) // self.moe.every

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention."""
        h = self.hidden
        if self.mla is not None:
            m = self.mla
            q_out = self.heads * (m.nope_dim + m.rope_dim)
            q = h * q_out if m.q_lora is None else m.q_lora * (h + q_out)
            kv = h * (m.kv_lora + m.rope_dim) + m.kv_lora * self.heads * (m.nope_dim + m.v_dim)
            return q + kv + self.heads * m.v_dim * h
        return h * (2 * self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def num_params(self) -> int:
        """All weights (norms and biases, under 0.1 %, left out)."""
        total = self.layers * self.attention_params + self.embedding_params
        total += self.dense_layers * mlp_params(self.hidden, self.intermediate, self.gated)
        if self.moe is not None:
            moe = self.moe
            expert = mlp_params(self.hidden, moe.intermediate, moe.gated)
            shared = mlp_params(self.hidden, moe.shared_intermediate, moe.gated)
            router = self.hidden * moe.experts
            total += self.moe_layers * (moe.experts * expert + shared + router)
        return total

    @property
    def embedding_params(self) -> int:
        tables = 1 if self.tied_embeddings else 2
        positions = self.context if self.learned_positions else 0
        return (tables * self.vocab + positions) * self.hidden

    def kv_bytes_per_token(self, kv_dtype: str = "bf16") -> int:
        """KV cache of one token over all layers, before any parallel plan divides it."""
        width = DTYPE_BYTES[kv_dtype]
        if self.mla is not None:
            return int(self.layers * (self.mla.kv_lora + self.mla.rope_dim) * width)
        return int(2 * self.layers * self.kv_heads * self.head_dim * width)


def mlp_params(hidden: int, intermediate: int, gated: bool) -> int:
    return (3 if gated else 2) * hidden * intermediate


def model(name: str) -> ModelShape:
    """A built-in model by any of its names, or the model of a Hugging Face `config.json`, given
    as the path of the file or of its folder. Raises UserError with the nearest match."""
    for spelling in (name, name.rsplit("/", 1)[-1]):
        for key in (_key(spelling), normalise(spelling)):
            if key in _by_alias():
                return _by_alias()[key]
    if name.endswith(".json") or os.path.isdir(name):
        from sim.cost.hf_config import from_config  # it needs the shapes defined here

        return from_config(Path(name))
    raise unknown("model", name, catalogue())


QUANTIZATIONS: Mapping[str, str] = {
    **{name: name for name in ("fp8", "fp8_block", "int8", "int4", "mxfp4", "nvfp4")},
    **dict.fromkeys(("awq", "gptq", "awq_marlin", "gptq_marlin"), "int4"),
}
"""How a user may ask for quantised weights -> `ModelShape.quantization`."""


def quantised(shape: ModelShape, name: str) -> ModelShape:
    """The model with its weights quantised. Raises UserError with the nearest match."""
    if name not in QUANTIZATIONS:
        raise unknown("quantization", name, QUANTIZATIONS)
    if name == "mxfp4" and shape.moe is None:
        raise UserError(f"quantization mxfp4 is for experts, which {shape.name} has not")
    return replace(shape, quantization=QUANTIZATIONS[name])


@cache
def catalogue() -> Mapping[str, ModelShape]:
    """Every built-in model by its canonical name."""
    return {e["name"]: _from_entry(e) for e in _entries()}


def aliases(shape: ModelShape) -> tuple[str, ...]:
    """The other names of a built-in model."""
    return tuple(next((e["aliases"] for e in _entries() if e["name"] == shape.name), ()))


def _from_entry(entry: Mapping[str, Any]) -> ModelShape:
    fields = {k: v for k, v in entry.items() if k != "aliases"}
    if "moe" in fields:
        fields["moe"] = MoeShape(**fields["moe"])
    if "mla" in fields:
        fields["mla"] = MlaShape(**fields["mla"])
    return ModelShape(**fields)


@cache
def _entries() -> list[dict[str, Any]]:
    text = files("sim.cost").joinpath("data/models.json").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)["models"]
    return entries


@cache
def _by_alias() -> dict[str, ModelShape]:
    """Every spelling. Without its point 2.4B would be 24B, so that spelling only counts where a
    single model has it (`llama-3-1-8b`)."""
    names: dict[str, ModelShape] = {}
    loose: dict[str, set[str]] = {}
    for entry in _entries():
        spellings = [entry["name"], *entry["aliases"]]
        for spelling in [*spellings, *(s.rsplit("/", 1)[-1] for s in spellings)]:
            names.setdefault(_key(spelling), catalogue()[entry["name"]])
            loose.setdefault(normalise(spelling), set()).add(entry["name"])
    for key, owners in loose.items():
        if len(owners) == 1:
            names.setdefault(key, catalogue()[owners.pop()])
    return names


def _key(name: str) -> str:
    """The form in which model names are compared: letters and digits, and where two numbers meet
    (`3.1-8B`, `3-1-8b`) a point."""
    apart = r"(?<=\d)([\W_]+)(?=\d)|[\W_]+"
    return re.sub(apart, lambda found: "." if found[1] else "", name.lower())
