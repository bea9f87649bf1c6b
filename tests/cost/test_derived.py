"""GPUs that nobody timed: shipped as such, and within what their datasheets allow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibrate.fit.inputs import gpu_of_profile
from calibrate.fit.shipped import TARGET, derived_gpus
from sim.cost import build_cost_model
from sim.cost.hardware import aliases, catalogue, gpu, gpu_from_datasheet
from sim.cost.interface import StepShape
from sim.cost.models import DTYPE_BYTES, ModelShape, mlp_params, model, quantised
from sim.cost.predictor import Predictor
from sim.cost.profile import derive, derived_names, for_gpu, load, save, shipped_names
from sim.engine.config import EngineConfig
from sim.errors import UserError
from sim.scenario import Scenario
from sim.system import System

MODELS = {
    "llama-3-8b": None,
    "llama-3-8b-fp8": "fp8",
    "opt-13b": None,
    "qwen3-30b-a3b": None,
    "qwen3-30b-a3b-fp8": "fp8",
    "mixtral-8x7b": None,
}


def test_every_built_in_gpu_ships_a_profile_of_one_kind() -> None:
    assert sorted(derived_names()) == sorted(derived_gpus())
    assert sorted([*shipped_names(), *derived_names()]) == sorted(catalogue())
    for name in ("H200-SXM", "A100-40G", "A10G", "L4", "A6000", "MI300X"):
        assert name in derived_names()


@pytest.mark.parametrize("name", derived_names())
def test_shipped_file_is_what_the_build_step_writes(name: str, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    save(derive(gpu(name)), again, by_reference=True)
    assert again.read_bytes() == (TARGET / f"{name}.json").read_bytes()
    shipped = load(TARGET / f"{name}.json")
    assert shipped == for_gpu(gpu(name)) == derive(gpu(name))


@pytest.mark.parametrize("name", derived_names())
def test_derived_profile_says_from_whom_and_what_was_scaled(name: str) -> None:
    card = gpu(name)
    profile = for_gpu(card)
    relative = gpu(profile.gpu)
    assert profile.derived_for == name
    assert relative.name in shipped_names()
    assert profile.provenance.startswith(f"derived, nothing was timed on {name}: ")
    assert relative.name in profile.provenance
    assert card.source in profile.provenance
    assert gpu_of_profile(profile, None).bandwidth == card.bandwidth
    scaled = profile.meta["scaled"]
    for field in ("bf16", "bandwidth", "sms", "nvlink"):
        old, new = getattr(relative, field), getattr(card, field)
        assert (field in scaled) == (old != new)
        assert old == new or (scaled[field]["from"], scaled[field]["to"]) == (old, new)


@pytest.mark.parametrize("name", derived_names())
def test_every_spelling_says_that_it_is_derived(name: str) -> None:
    for spelling in aliases(gpu(name)):
        for text in (spelling, spelling.lower(), spelling.replace("-", " ")):
            assert gpu(text).name == name
    system = System.of(Scenario.of(model="opt-1.3b", gpu=aliases(gpu(name))[-1].lower()))
    described = system.cost.describe()
    assert described["provenance"] == for_gpu(gpu(name)).provenance
    assert described["profile"].startswith(f"{name} (datasheet, efficiencies of ")


def test_other_datasheet_under_a_built_in_name_is_not_the_shipped_profile() -> None:
    sheet = {"name": "L4", "arch": "ada", "bf16": 100, "memory_gib": 20, "bandwidth": 250}
    profile = for_gpu(gpu_from_datasheet(sheet, "mine.json"))
    assert profile.meta["datasheet"]["bandwidth"] == 250
    assert "user (mine.json)" in profile.provenance


def test_entries_of_an_unknown_gpu_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    text = (TARGET / "L4.json").read_text().replace('"entries_of": "L40S"', '"entries_of": "L40"')
    file.write_text(text)
    with pytest.raises(UserError, match=r"x\.json.*'L40'; did you mean 'L40S'"):
        load(file)


def weights_read(shape: ModelShape) -> float:
    """Parameters that a step of one token must read: all but the embedding table and the experts
    that it does not choose."""
    total = shape.num_params - (0 if shape.tied_embeddings else shape.vocab * shape.hidden)
    if shape.moe is not None:
        expert = mlp_params(shape.hidden, shape.moe.intermediate, shape.moe.gated)
        total -= shape.moe_layers * (shape.moe.experts - shape.moe.topk) * expert
    return total


@pytest.mark.parametrize("gpu_name", catalogue())
@pytest.mark.parametrize("name", MODELS)
def test_no_step_beats_the_datasheet(gpu_name: str, name: str) -> None:
    card, dtype = gpu(gpu_name), MODELS[name]
    shape = model(name.removesuffix("-fp8"))
    if dtype is not None:
        shape = quantised(shape, dtype)
    settings = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}
    engine = EngineConfig.for_gpu(card.name, card.memory_bytes, shape.context, settings)
    cost = build_cost_model(shape, card, engine, host_zero=True)
    params = weights_read(shape)
    head = shape.vocab * shape.hidden
    width = DTYPE_BYTES[dtype or "bf16"]
    streamed = ((params - head) * width + head * 2) / card.bytes_per_s
    kv = shape.kv_bytes_per_token() * 1000 / card.bytes_per_s
    for batch in (1, 8, 64, 256):
        step = StepShape(batch, batch * 1000, batch * 1000**2, (), batch)
        assert cost.step_ns(step) >= (streamed + batch * kv) * 1e9
    prompts = StepShape(0, 0, 0, ((2048, 0),) * 4, 4)
    computed = 2 * (params - head) * 8192 / card.peak_flops(dtype or "bf16")
    assert cost.step_ns(prompts) >= computed * 1e9


@pytest.mark.parametrize("gpu_name", catalogue())
def test_small_weights_are_not_read_faster_than_memory_allows(gpu_name: str) -> None:
    card = gpu(gpu_name)
    predictor = Predictor(for_gpu(card), card)
    us_per_byte = (1 - 1e-9) * 1e6 / card.bytes_per_s
    for n, k in ((512, 512), (2048, 2048), (4096, 4096), (6144, 4096)):
        assert np.all(predictor.gemm_us([1, 16, 64], n, k, "bf16") >= 2 * n * k * us_per_byte)
    experts = predictor.moe_us([1], 2048, 768, 8, 128, 1, 1, "fp8")
    assert np.all(experts >= 8 * 3 * 2048 * 768 * us_per_byte)
