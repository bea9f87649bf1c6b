"""Model shapes: the numbers of an architecture that its cost depends on.

Built in for the models of `data/models.json`; any other is read from a Hugging Face `config.json`.
"""

from __future__ import annotations

import json
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
    wanted = normalise(name)
    found = _by_alias().get(wanted)
    if found is None and "/" in name:
        found = _by_alias().get(normalise(name.rsplit("/", 1)[1]))
    if found is not None:
        return found
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return from_config(path)
    raise unknown("model", name, catalogue())


@cache
def catalogue() -> Mapping[str, ModelShape]:
    """Every built-in model by its canonical name."""
    return {e["name"]: _from_entry(e) for e in _entries()}


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
    by_name = catalogue()
    names = {normalise(a): by_name[e["name"]] for e in _entries() for a in e["aliases"]}
    names |= {normalise(n.rsplit("/", 1)[-1]): m for n, m in list(names.items())}
    names |= {normalise(n): m for n, m in by_name.items()}
    for entry in _entries():
        for alias in entry["aliases"]:
            names.setdefault(normalise(alias.rsplit("/", 1)[-1]), by_name[entry["name"]])
    return names


def from_config(path: Path) -> ModelShape:
    """The model of a Hugging Face `config.json`. Raises UserError naming the file and the field
    that is missing."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read the model's config ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a model config (expected a JSON object)")
    name = raw.get("_name_or_path") or path.resolve().parent.name
    shape = _from_hf(raw, str(path), str(name))
    return replace(shape, top_p=_asks_top_p(path.parent / "generation_config.json"))


def _asks_top_p(path: Path) -> bool:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the file is optional; without it vLLM samples without top-p
    return isinstance(config, dict) and float(config.get("top_p") or 1.0) < 1.0


def _from_hf(raw: Mapping[str, Any], where: str, name: str) -> ModelShape:
    text = raw.get("text_config")
    config = {**raw, **text} if isinstance(text, dict) else raw

    def first(*keys: str, default: Any = None) -> Any:
        for key in keys:
            if config.get(key) is not None:
                return config[key]
        if default is None:
            raise UserError(f"{where}: no {keys[0]!r} in the model's config")
        return default

    def number(*keys: str, default: int | None = None) -> int:
        value = first(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"{where}: {keys[0]!r} must be a whole number, not {value!r}")
        return value

    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head")
    layers = number("num_hidden_layers", "n_layer", "num_layers")
    if min(hidden, heads, layers) == 0:
        raise UserError(f"{where}: hidden size, heads and layers must be positive")
    kind = str(config.get("model_type", ""))
    classic = kind in ("opt", "gpt2", "falcon", "phi", "gptj", "gpt_neox")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        intermediate=number(
            "intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden
        ),
        vocab=number("vocab_size"),
        context=number("max_position_embeddings", "n_positions", "seq_length", default=2048),
        moe=_hf_moe(config, number),
        mla=_hf_mla(config, number),
        gated=not classic,
        tied_embeddings=bool(config.get("tie_word_embeddings", kind in ("opt", "gpt2"))),
        learned_positions=kind in ("opt", "gpt2"),
        parallel_attention=kind in ("falcon", "phi", "gptj"),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        sliding_window=int(window) if window else None,
        attention_chunk=config.get("attention_chunk_size"),
        chunked_layers=layers * 3 // 4 if config.get("attention_chunk_size") else 0,
        weight_dtype={"float16": "fp16", "float32": "fp32"}.get(
            str(config.get("torch_dtype") or config.get("dtype")), "bf16"
        ),
        quantization=_hf_quantization(config, where),
        source=where,
    )


def _hf_moe(config: Mapping[str, Any], number: Any) -> MoeShape | None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    if not any(config.get(k) for k in keys):
        return None
    width = number("moe_intermediate_size", "intermediate_size")
    shared = config.get("shared_expert_intermediate_size")
    if shared is None:
        shared = width * int(config.get("n_shared_experts") or 0)
        if config.get("model_type") in ("llama4", "llama4_text"):
            shared = width
    return MoeShape(
        experts=number(*keys),
        topk=number("num_experts_per_tok", "num_experts_per_token", "moe_topk", default=1),
        intermediate=width,
        shared_intermediate=int(shared),
        dense_layers=int(config.get("first_k_dense_replace") or 0),
        every=int(
            config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or 1
        ),
    )


def _hf_mla(config: Mapping[str, Any], number: Any) -> MlaShape | None:
    if not config.get("kv_lora_rank"):
        return None
    return MlaShape(
        kv_lora=number("kv_lora_rank"),
        nope_dim=number("qk_nope_head_dim"),
        rope_dim=number("qk_rope_head_dim"),
        v_dim=number("v_head_dim"),
        q_lora=config.get("q_lora_rank"),
    )


def _hf_quantization(config: Mapping[str, Any], where: str) -> str | None:
    quant = config.get("quantization_config")
    if not isinstance(quant, dict):
        return None
    method = str(quant.get("quant_method", ""))
    if method == "fp8":
        return "fp8_block" if quant.get("weight_block_size") else "fp8"
    if method in ("awq", "gptq"):
        return "int8" if quant.get("bits") == 8 else "int4"
    if method == "compressed-tensors":
        text = json.dumps(quant)
        if '"num_bits": 4' in text:
            return "nvfp4" if '"float"' in text else "int4"
        return "fp8" if '"float"' in text else "int8"
    if method in ("mxfp4", "modelopt"):
        return "mxfp4" if method == "mxfp4" else "fp8"
    raise UserError(f"{where}: quantization method {method!r} is not supported")
