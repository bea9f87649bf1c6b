"""Model folders: Hugging Face's names and layout, and what is said when something is missing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from calibrate.engine.architecture import architecture
from calibrate.engine.device import pick_device
from calibrate.engine.llm import Llm, load_model
from calibrate.engine.sampling import SamplingParams
from calibrate.engine.weights import Weights
from sim.engine.config import EngineConfig
from sim.errors import UserError
from tests.real_engine import reference
from tests.real_engine.models import MODELS, weights

KIND = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "mistral": "mistral",
    "mixtral": "mixtral", "qwen2_moe": "qwen2_moe",
}  # fmt: skip


def hf_config(name: str) -> dict[str, object]:
    arch = MODELS[name]
    s = arch.shape
    config: dict[str, object] = {
        "model_type": KIND[name], "hidden_size": s.hidden, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim,
        "intermediate_size": s.intermediate, "vocab_size": s.vocab, "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": s.context, "rope_theta": arch.rope_theta,
        "tie_word_embeddings": s.tied_embeddings, "eos_token_id": 198,
    }  # fmt: skip
    if arch.rope_scaling:
        config["rope_scaling"] = dict(arch.rope_scaling)
    if s.sliding_window:
        config["sliding_window"] = s.sliding_window
    if s.moe and name == "mixtral":
        config |= {"num_local_experts": s.moe.experts, "num_experts_per_tok": s.moe.topk,
                   "intermediate_size": s.moe.intermediate}  # fmt: skip
    elif s.moe:
        config |= {
            "num_experts": s.moe.experts, "num_experts_per_tok": s.moe.topk,
            "moe_intermediate_size": s.moe.intermediate, "norm_topk_prob": arch.renormalise,
            "shared_expert_intermediate_size": s.moe.shared_intermediate,
        }  # fmt: skip
    return config


def hf_tensors(name: str, made: Weights) -> dict[str, torch.Tensor]:
    s = MODELS[name].shape
    found = {"model.embed_tokens.weight": made.embedding, "model.norm.weight": made.norm}
    if not s.tied_embeddings:
        found["lm_head.weight"] = made.lm_head
    sizes = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
    for i, layer in enumerate(made.layers):
        at = f"model.layers.{i}"
        for part, tensor in zip("qkv", layer.qkv.split(sizes), strict=True):
            found[f"{at}.self_attn.{part}_proj.weight"] = tensor
        if layer.qkv_bias is not None:
            for part, tensor in zip("qkv", layer.qkv_bias.split(sizes), strict=True):
                found[f"{at}.self_attn.{part}_proj.bias"] = tensor
        if layer.q_norm is not None:
            found[f"{at}.self_attn.q_norm.weight"] = layer.q_norm
            found[f"{at}.self_attn.k_norm.weight"] = layer.k_norm
        found[f"{at}.self_attn.o_proj.weight"] = layer.o
        found[f"{at}.input_layernorm.weight"] = layer.attention_norm
        found[f"{at}.post_attention_layernorm.weight"] = layer.mlp_norm
        if layer.experts is None:
            gate, up = layer.gate_up.chunk(2)
            found |= {f"{at}.mlp.gate_proj.weight": gate, f"{at}.mlp.up_proj.weight": up,
                      f"{at}.mlp.down_proj.weight": layer.down}  # fmt: skip
            continue
        experts = layer.experts
        root = f"{at}.block_sparse_moe" if name == "mixtral" else f"{at}.mlp"
        names = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        found[f"{root}.gate.weight"] = experts.router
        for e in range(len(experts.down)):
            gate, up = experts.gate_up[e].chunk(2)
            for part, tensor in zip(names, (gate, up, experts.down[e]), strict=True):
                found[f"{root}.experts.{e}.{part}.weight"] = tensor
        if experts.shared_gate_up is not None:
            gate, up = experts.shared_gate_up.chunk(2)
            found |= {
                f"{root}.shared_expert.gate_proj.weight": gate,
                f"{root}.shared_expert.up_proj.weight": up,
                f"{root}.shared_expert.down_proj.weight": experts.shared_down,
                f"{root}.shared_expert_gate.weight": experts.shared_gate,
            }
    return {k: v.contiguous().clone() for k, v in found.items()}


def write(folder, name: str, without: str | None = None) -> Weights:
    made = weights(MODELS[name])
    if MODELS[name].shape.moe is not None:  # checkpoints have no routing bias
        for layer in made.layers:
            layer.experts.bias.zero_()
    tensors = hf_tensors(name, made)
    if without is not None:
        del tensors[without]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(name)))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_a_folder_give_the_plain_forward(tmp_path, name):
    made = write(tmp_path, name)
    arch, loaded = load_model(str(tmp_path), dtype="fp32")
    assert arch.eos == (198,)
    prompt = [3, 14, 15, 92, 65, 35]
    config = EngineConfig(max_model_len=64, num_gpu_blocks=20, async_scheduling=False,
                          sliding_window=arch.shape.sliding_window)  # fmt: skip
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    output = Llm(arch, loaded, config).generate([prompt], params)[0].output
    assert output == reference.greedy(MODELS[name], made, prompt, 6)


def test_loading_names_a_missing_or_misshapen_tensor(tmp_path):
    write(tmp_path, "llama", without="model.layers.1.self_attn.o_proj.weight")
    with pytest.raises(UserError, match=r"'model.layers.1.self_attn.o_proj.weight' is missing"):
        load_model(str(tmp_path))
    write(tmp_path, "llama")
    config = hf_config("llama") | {"intermediate_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"gate_proj.weight' has shape \(96, 64\).*\(100, 64\)"):
        load_model(str(tmp_path))


def test_loading_refuses_what_is_not_there_or_not_supported(tmp_path):
    with pytest.raises(UserError, match=r"no config.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama")))
    with pytest.raises(UserError, match=r"no \*.safetensors"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="not a safetensors file"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama") | {"model_type": "gpt2"}))
    with pytest.raises(UserError, match="gpt2"):
        load_model(str(tmp_path))
    with pytest.raises(UserError, match="did you mean"):
        load_model("lama-3-8b")
    with pytest.raises(UserError, match="cannot run"):
        architecture("OPT-125M")


def test_device_that_is_not_there_is_one_line():
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="did you mean 'cuda'"):
        pick_device("cudda")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="use --device cpu"):
            pick_device("cuda")


def test_prompts_that_cannot_be_served_are_refused():
    arch = MODELS["llama"]
    llm = Llm(arch, weights(arch), EngineConfig(max_model_len=32, num_gpu_blocks=3))
    for prompt, params, message in (
        ([], SamplingParams(), "at least one token"),
        ([199], SamplingParams(), "outside the vocabulary of 199"),
        ([1] * 32, SamplingParams(), "max_model_len 32"),
        ([1] * 20, SamplingParams(max_tokens=30), "not fit 2 KV blocks"),
        ([1], SamplingParams(stop=("x",)), "tokenizer"),
    ):
        if message == "not fit 2 KV blocks":
            llm = Llm(arch, weights(arch), EngineConfig(max_model_len=64, num_gpu_blocks=3))
        with pytest.raises(UserError, match=message):
            llm.generate([prompt], params)
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"max_tokens": 0}):
        with pytest.raises(UserError):
            SamplingParams(**wrong)
