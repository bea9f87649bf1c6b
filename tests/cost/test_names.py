"""Every spelling of GPUs and models in the shared data is understood."""

from __future__ import annotations

import pytest

from sim.cost.hardware import gpu, gpu_from_datasheet
from sim.cost.models import catalogue, model
from sim.errors import UserError

GPUS = {
    "a100-80g": "A100-80G", "A100-SXM": "A100-80G", "A100-80GB": "A100-80G", "a100_dgx": "A100-80G",
    "h100": "H100-SXM", "H100-80GB-SXM": "H100-SXM", "H100-80GB (GKE nvidia-h100-80gb)": "H100-SXM",
    "NVIDIA H100 80GB HBM3": "H100-SXM", "h200": "H200-SXM", "H200-SXM": "H200-SXM",
    "L40S-48GB": "L40S", "RTX 4090 24GB": "RTX-4090", "RTX4090": "RTX-4090",
    "RTX PRO 6000 96GB": "RTX-PRO-6000", "RTXPRO6000": "RTX-PRO-6000",
    "RTXPRO6000-SE": "RTX-PRO-6000-SE", "RTX A6000 48GB": "A6000", "B200-SXM": "B200-SXM",
    "gb200": "GB200", "b300_sxm": "B300-SXM", "mi300x": "MI300X", "A10G": "A10G", "L4": "L4",
}  # fmt: skip

MODELS = {
    "llama-3-8b": "Llama-3-8B", "meta-llama/Meta-Llama-3-8B": "Llama-3-8B",
    "llama-3-70b": "Llama-3-70B", "Meta-Llama-3-70B": "Llama-3-70B",
    "meta-llama/Llama-2-7b-hf": "Llama-2-7B", "Llama-2-70b-hf": "Llama-2-70B",
    "codellama/CodeLlama-34b-Instruct-hf": "CodeLlama-34B", "Qwen-72B": "Qwen-72B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B", "Qwen/Qwen3-14B": "Qwen3-14B",
    "Qwen3-30B-A3B-Instruct-2507": "Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1": "Mixtral-8x7B",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "Mixtral-8x22B", "01-ai/Yi-34B": "Yi-34B",
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": "Llama-4-Scout", "phi-2": "Phi-2",
    "microsoft/Phi-mini-MoE-instruct": "Phi-mini-MoE", "internlm-20b": "InternLM-20B",
    "mistralai/Mistral-Nemo-Instruct-2407": "Mistral-Nemo-12B", "OPT-13B": "OPT-13B",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen2.5-7B", "deepseek-v3": "DeepSeek-V3",
}  # fmt: skip

PARAMETERS_B = {
    "Llama-3-8B": 8.03, "Llama-3-70B": 70.6, "Mixtral-8x7B": 46.7, "Qwen3-30B-A3B": 30.5,
    "DeepSeek-V3": 671.0, "Llama-2-7B": 6.74, "OPT-13B": 12.9, "Falcon-180B": 180.0,
    "Llama-30B": 32.5, "Yi-34B": 34.4, "GPT-3-175B": 175.0, "DeepSpeed-MoE-1.3B-128": 52.0,
}  # fmt: skip

KV_BYTES = {
    "Llama-3-8B": 131_072, "Llama-3-70B": 327_680, "OPT-66B": 2_359_296, "Yi-34B": 245_760,
    "Falcon-180B": 163_840, "Qwen3-30B-A3B": 98_304, "DeepSeek-V3": 70_272,
}  # fmt: skip


@pytest.mark.parametrize("name", GPUS)
def test_gpu_spelling_is_understood(name: str) -> None:
    assert gpu(name).name == GPUS[name]


@pytest.mark.parametrize("name", MODELS)
def test_model_spelling_is_understood(name: str) -> None:
    assert model(name).name == MODELS[name]


@pytest.mark.parametrize("name", PARAMETERS_B)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert catalogue()[name].num_params / 1e9 == pytest.approx(PARAMETERS_B[name], rel=0.01)


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes_are_the_published_ones(name: str) -> None:
    assert catalogue()[name].kv_bytes_per_token() == KV_BYTES[name]


def test_unknown_names_come_with_the_nearest_match() -> None:
    with pytest.raises(UserError, match="did you mean 'H100-SXM'"):
        gpu("h100-sxmm")
    with pytest.raises(UserError, match="did you mean 'Llama-3-8B'"):
        model("lama-3-8b")


def test_datasheet_needs_its_peaks() -> None:
    sheet = {"name": "X1", "bf16": 100, "memory_gib": 40, "bandwidth": 1000}
    assert gpu_from_datasheet(sheet, "x.json").peak_flops("bf16") == 100e12
    with pytest.raises(UserError, match=r"x.json.*bandwidth"):
        gpu_from_datasheet({k: v for k, v in sheet.items() if k != "bandwidth"}, "x.json")
    with pytest.raises(UserError, match="bandwith"):
        gpu_from_datasheet({**sheet, "bandwith": 1}, "x.json")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("facebook/opt-1.3b", "OPT-1.3B"),
        ("opt-1-3b", "OPT-1.3B"),
        ("OPT_13B", "OPT-13B"),
        ("opt13b", "OPT-13B"),
        ("deepspeed-moe-2.4b-128", "DeepSpeed-MoE-2.4B-128"),
        ("DeepSpeed MoE 24B 128", "DeepSpeed-MoE-24B-128"),
        ("llama-3-1-8b", "Llama-3.1-8B"),
        ("llama_3.1_8b", "Llama-3.1-8B"),
        ("llama318b", "Llama-3.1-8B"),
        ("llama38b", "Llama-3-8B"),
    ],
)
def test_points_in_names_count(name: str, found: str) -> None:
    assert model(name).name == found


def test_every_name_finds_its_own_model() -> None:
    for name in catalogue():
        for spelling in (name, name.lower(), name.replace("-", "_"), name.replace("-", " ")):
            assert model(spelling).name == name
