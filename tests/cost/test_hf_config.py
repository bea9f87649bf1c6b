"""Models read from a Hugging Face `config.json`, and what is wrong with some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.cost.hf_config import from_config
from sim.cost.models import model
from sim.errors import UserError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def read(folder: Path, content: dict[str, Any] | str) -> Any:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text)
    return from_config(folder)


def test_the_same_numbers_give_the_same_model(tmp_path: Path) -> None:
    ours, known = read(tmp_path, LLAMA), model("llama-3-8b")
    assert ours.num_params == known.num_params
    assert ours.kv_bytes_per_token() == known.kv_bytes_per_token()
    assert (ours.context, ours.weight_dtype) == (known.context, known.weight_dtype)
    moe = read(tmp_path, MIXTRAL)
    assert (moe.moe.experts, moe.moe.topk, moe.moe.intermediate) == (8, 2, 14336)


def test_fields_of_the_text_part_come_first(tmp_path: Path) -> None:
    nested = {"text_config": LLAMA, "hidden_size": 1, "vocab_size": 2}
    assert read(tmp_path, nested).num_params == model("llama-3-8b").num_params


def test_top_p_comes_from_the_generation_config(tmp_path: Path) -> None:
    assert not read(tmp_path, LLAMA).top_p
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.9}')
    assert read(tmp_path, LLAMA).top_p
    (tmp_path / "generation_config.json").write_text('{"top_p": "x"}')
    with pytest.raises(UserError, match=r"generation_config.json: 'top_p' must be a number"):
        read(tmp_path, LLAMA)


@pytest.mark.parametrize(
    "name",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"config.json: no .*'{name}'"):
        read(tmp_path, {k: v for k, v in LLAMA.items() if k != name})


@pytest.mark.parametrize("value", [0, -1, 1.5, "4096", True, [], {}, float("nan"), 1e30])
@pytest.mark.parametrize("name", [k for k in MIXTRAL if k not in ("model_type", "torch_dtype")])
def test_a_wrong_number_is_named(tmp_path: Path, name: str, value: Any) -> None:
    if (name, value) == ("num_local_experts", 0):
        assert read(tmp_path, MIXTRAL | {name: value}).moe is None
        return
    with pytest.raises(UserError, match=rf"config.json: '{name}' must be a whole number"):
        read(tmp_path, MIXTRAL | {name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 5}, "5 KV heads do not divide 32 heads"),
        ({"num_attention_heads": 10**9, "num_key_value_heads": 1}, "heads in a hidden size"),
        ({"head_dim": 0}, "'head_dim' must be a whole number"),
        ({"sliding_window": "x"}, "'sliding_window' must be a whole number"),
        ({"sliding_window": -1}, "'sliding_window' must be a whole number"),
        ({"num_experts_per_tok": 9, "num_local_experts": 8}, "9 of 8 experts"),
        ({"num_local_experts": 8}, "no 'num_experts_per_tok'"),
        ({"torch_dtype": "int3"}, "dtype 'int3' are not supported"),
        ({"quantization_config": 3}, "'quantization_config' must be an object"),
        ({"quantization_config": {"quant_method": "x"}}, "quantization method 'x'"),
        ({"kv_lora_rank": 512}, "no 'qk_nope_head_dim'"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, LLAMA | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[]", "not a model config"),
        ("\0", "not JSON"),
    ],
)
def test_files_that_hold_no_config(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize("name", ["", " ", "a" * 5000, "a\0b", "a" * 5000 + ".json", "a\0.json"])
def test_names_that_no_file_has(name: str) -> None:
    with pytest.raises(UserError, match=r"unknown model|cannot be read"):
        model(name)
