"""Weights from a model folder: safetensors files with Hugging Face's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from calibrate.engine.architecture import Architecture
from calibrate.engine.weights import Experts, Layer, Weights
from sim.errors import UserError


class _Tensors:
    """The tensors of a folder by name, read one at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device | str) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise UserError("reading weights needs safetensors: pip install safetensors") from error
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no *.safetensors file in this model folder")
        self.folder, self.dtype, self.device = folder, dtype, device
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safe_open(str(file), framework="pt")
                self._where.update(dict.fromkeys(opened.keys(), opened))
            except Exception as error:  # safetensors raises its own type, unexported
                raise UserError(f"{file}: not a safetensors file ({error})") from error
        self._missing_index(folder)

    def _missing_index(self, folder: Path) -> None:
        """A sharded model names its files: say which one is not there."""
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            absent = sorted(name for name in wanted if not (folder / name).is_file())
            if absent:
                raise UserError(f"{folder}: {len(absent)} weight files missing: {absent[0]}, ...")

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._where:
            raise UserError(f"{self.folder}: tensor {name!r} is missing from the weight files")
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{self.folder}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"config.json asks for {shape}"
            )
        return tensor.to(device=self.device, dtype=self.dtype)

    def rows(self, *parts: tuple[str, int], width: int) -> torch.Tensor:
        """Matrices of one width below each other."""
        return torch.cat([self.get(name, rows, width) for name, rows in parts])


def load_weights(
    folder: Path,
    arch: Architecture,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Weights:
    """Raises UserError naming the folder and the first tensor that is missing or misshapen."""
    shape = arch.shape
    tensors = _Tensors(folder, dtype, device)
    embedding = tensors.get("model.embed_tokens.weight", shape.vocab, shape.hidden)
    tied = shape.tied_embeddings
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(tensors, arch, i) for i in range(shape.layers)),
        norm=tensors.get("model.norm.weight", shape.hidden),
        lm_head=embedding if tied else tensors.get("lm_head.weight", shape.vocab, shape.hidden),
    )


def _layer(tensors: _Tensors, arch: Architecture, index: int) -> Layer:
    shape, at = arch.shape, f"model.layers.{index}"
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    heads = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    bias = None
    if arch.qkv_bias:
        bias = torch.cat([tensors.get(f"{at}.self_attn.{n}.bias", rows) for n, rows in heads])
    dense = shape.moe is None
    gate_up = down = None
    if dense:
        gate_up = _gate_up(tensors, f"{at}.mlp", shape.intermediate, shape.hidden)
        down = tensors.get(f"{at}.mlp.down_proj.weight", shape.hidden, shape.intermediate)
    return Layer(
        attention_norm=tensors.get(f"{at}.input_layernorm.weight", shape.hidden),
        qkv=tensors.rows(
            *((f"{at}.self_attn.{n}.weight", rows) for n, rows in heads), width=shape.hidden
        ),
        qkv_bias=bias,
        q_norm=_head_norm(tensors, arch, f"{at}.self_attn.q_norm.weight"),
        k_norm=_head_norm(tensors, arch, f"{at}.self_attn.k_norm.weight"),
        o=tensors.get(f"{at}.self_attn.o_proj.weight", shape.hidden, q),
        mlp_norm=tensors.get(f"{at}.post_attention_layernorm.weight", shape.hidden),
        gate_up=gate_up,
        down=down,
        experts=None if dense else _experts(tensors, arch, at),
    )


def _head_norm(tensors: _Tensors, arch: Architecture, name: str) -> torch.Tensor | None:
    return tensors.get(name, arch.shape.head_dim) if arch.shape.qk_norm else None


def _gate_up(tensors: _Tensors, at: str, width: int, hidden: int) -> torch.Tensor:
    parts = ((f"{at}.gate_proj.weight", width), (f"{at}.up_proj.weight", width))
    return tensors.rows(*parts, width=hidden)


def _experts(tensors: _Tensors, arch: Architecture, at: str) -> Experts:
    """Mixtral says `block_sparse_moe` with w1, w3, w2; Qwen says `mlp` with gate, up, down."""
    shape, moe = arch.shape, arch.shape.moe
    if moe is None:
        raise UserError(f"{tensors.folder}: this model has no experts")
    width, hidden = moe.intermediate, shape.hidden
    mixtral = f"{at}.block_sparse_moe.gate.weight" in tensors
    root = f"{at}.block_sparse_moe" if mixtral else f"{at}.mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    gate_up, downs = [], []
    for e in range(moe.experts):
        expert = f"{root}.experts.{e}"
        parts = ((f"{expert}.{gate}.weight", width), (f"{expert}.{up}.weight", width))
        gate_up.append(tensors.rows(*parts, width=hidden))
        downs.append(tensors.get(f"{expert}.{down}.weight", hidden, width))
    shared = moe.shared_intermediate
    at_shared = f"{root}.shared_expert"
    return Experts(
        router=tensors.get(f"{root}.gate.weight", moe.experts, hidden),
        gate_up=torch.stack(gate_up),
        down=torch.stack(downs),
        shared_gate_up=_gate_up(tensors, at_shared, shared, hidden) if shared else None,
        shared_down=tensors.get(f"{at_shared}.down_proj.weight", hidden, shared)
        if shared
        else None,
        shared_gate=(
            tensors.get(f"{at_shared}_gate.weight", 1, hidden)
            if shared and arch.shared_gate
            else None
        ),
    )
