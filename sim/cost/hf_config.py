"""The model of a Hugging Face `config.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sim.cost.models import MlaShape, ModelShape, MoeShape
from sim.errors import UserError
from sim.files import read_text

CLASSIC = ("opt", "gpt2", "falcon", "phi", "gptj", "gpt_neox")
"""`model_type`s with two MLP matrices, which may leave their width out: it is 4 hidden sizes."""

MLP_WIDTHS = ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner")
"""A dense layer's width. Llama 4 names it first; there `intermediate_size` is an expert's."""

WEIGHT_DTYPES = {
    "None": "bf16", "auto": "bf16", "bfloat16": "bf16", "bf16": "bf16",
    "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
}  # fmt: skip


def from_config(path: Path) -> ModelShape:
    """The model of a `config.json`, given as the file or as its folder. Raises UserError naming
    the file and the field that is missing or wrong."""
    if os.path.isdir(path):
        path = path / "config.json"
    raw = _read_object(path, "a model config")
    name = raw.get("_name_or_path") or path.resolve().parent.name
    shape = _shape(_Config(raw, str(path)), str(name))
    generation = path.parent / "generation_config.json"
    if not generation.exists():
        return shape  # without it vLLM samples without top-p
    top_p = _read_object(generation, "a generation config").get("top_p")
    if not isinstance(top_p, int | float | None):
        raise UserError(f"{generation}: 'top_p' must be a number, not {top_p!r}")
    return replace(shape, top_p=top_p is not None and top_p < 1)


def _read_object(path: Path, what: str) -> dict[str, Any]:
    text = read_text(path)
    try:
        found = json.loads(text)
    except RecursionError:
        raise UserError(f"{path}: not JSON (nested too deep)") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: not {what} (expected a JSON object)")
    return found


@dataclass(frozen=True)
class _Config:
    """The fields of a config; those of `text_config` come first."""

    raw: Mapping[str, Any]
    where: str

    def get(self, *keys: str) -> tuple[str, Any]:
        """The first of `keys` that is there, and its value; the last of them and None."""
        text = self.raw.get("text_config")
        for key in keys:
            for fields in (text, self.raw):
                if isinstance(fields, dict) and fields.get(key) is not None:
                    return key, fields[key]
        return keys[-1], None

    def number(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`. No `default`: it must be there."""
        key, value = self.get(*keys)
        if value is None:
            if default is None:
                raise UserError(f"{self.where}: no {' or '.join(map(repr, keys))} in it")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            shown = repr(value)[:80]
            raise UserError(
                f"{self.where}: {key!r} must be a whole number of at least {least}, not {shown}"
            )
        return value


def _shape(config: _Config, name: str) -> ModelShape:
    number = config.number
    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head")
    kv_heads = number("num_key_value_heads", "num_kv_heads", default=heads)
    layers = number("num_hidden_layers", "n_layer", "num_layers")
    if heads % kv_heads:
        raise UserError(f"{config.where}: {kv_heads} KV heads do not divide {heads} heads")
    if config.get("head_dim")[1] is None and heads > hidden:
        raise UserError(f"{config.where}: {heads} heads in a hidden size of {hidden}")
    kind = str(config.get("model_type")[1] or "")
    moe = _moe(config, kind)
    width = 4 * hidden if kind in CLASSIC or moe is not None else None
    window = number("sliding_window", default=0, least=0)
    if config.get("use_sliding_window")[1] is False:
        window = 0
    chunk = number("attention_chunk_size", default=0, least=0)
    tied = config.get("tie_word_embeddings")[1]
    dtype = str(config.get("torch_dtype", "dtype")[1])
    if dtype not in WEIGHT_DTYPES:
        raise UserError(f"{config.where}: weights of dtype {dtype!r} are not supported")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=number("head_dim", default=hidden // heads),
        intermediate=number(*MLP_WIDTHS, default=width),
        vocab=number("vocab_size"),
        context=number(
            "max_position_embeddings",
            "n_positions",
            "seq_length",
            default=2048 if kind in CLASSIC else None,
        ),
        moe=moe,
        mla=_mla(config),
        gated=kind not in CLASSIC,
        tied_embeddings=kind in ("opt", "gpt2") if tied is None else bool(tied),
        learned_positions=kind in ("opt", "gpt2"),
        parallel_attention=kind in ("falcon", "phi", "gptj"),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        sliding_window=window or None,
        attention_chunk=chunk or None,
        chunked_layers=layers * 3 // 4 if chunk else 0,
        weight_dtype=WEIGHT_DTYPES[dtype],
        quantization=_quantization(config),
        source=config.where,
    )


def _moe(config: _Config, kind: str) -> MoeShape | None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    number = config.number
    experts = number(*keys, default=0, least=0)
    if not experts:
        return None
    topk = number("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if topk > experts:
        raise UserError(f"{config.where}: each token goes to {topk} of {experts} experts")
    width = number("moe_intermediate_size", "intermediate_size")
    shared = width * number("n_shared_experts", default=0, least=0)
    if kind in ("llama4", "llama4_text"):
        shared = width
    return MoeShape(
        experts=experts,
        topk=topk,
        intermediate=width,
        shared_intermediate=number("shared_expert_intermediate_size", default=shared, least=0),
        dense_layers=number("first_k_dense_replace", default=0, least=0),
        every=number("interleave_moe_layer_step", "decoder_sparse_step", default=1),
    )


def _mla(config: _Config) -> MlaShape | None:
    if not config.number("kv_lora_rank", default=0, least=0):
        return None
    return MlaShape(
        kv_lora=config.number("kv_lora_rank"),
        nope_dim=config.number("qk_nope_head_dim"),
        rope_dim=config.number("qk_rope_head_dim"),
        v_dim=config.number("v_head_dim"),
        q_lora=config.number("q_lora_rank", default=0, least=0) or None,
    )


def _quantization(config: _Config) -> str | None:
    quant = config.get("quantization_config")[1]
    if quant is None:
        return None
    if not isinstance(quant, dict):
        raise UserError(f"{config.where}: 'quantization_config' must be an object, not {quant!r}")
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
    raise UserError(f"{config.where}: quantization method {method!r} is not supported")
