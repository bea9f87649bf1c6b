"""Pipeline parallelism: a lone request pays every stage, a full pipeline one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.cost import build_cost_model
from sim.cost.hardware import gpu
from sim.cost.interface import StepShape
from sim.cost.models import model
from sim.cost.speculative import with_draft
from sim.cost.step import StepCost
from sim.engine.config import EngineConfig
from sim.run import simulate
from sim.scenario import Scenario

MODEL, GPU = "llama-3-8b", "h200"


def cost_of(pp: int, **settings: object) -> StepCost:
    card = gpu(GPU)
    settings = {"pipeline_parallel_size": pp, "max_num_seqs": 64, **settings}
    engine = EngineConfig.for_gpu(card.name, card.memory_bytes, 4096, settings)
    return build_cost_model(model(MODEL), card, engine, host_zero=True)


def run(pp: int, workload: str, **engine: object) -> dict[str, object]:
    scenario = Scenario.of(
        model=MODEL, gpu=GPU, generate=workload, capacity_probe=False,
        engine={"pipeline_parallel_size": pp, "num_gpu_blocks": 20_000, **engine},
        cost={"host_zero": True, "frontend": "none"},
    )  # fmt: skip
    return simulate(scenario).summary


def sends_s(pp: int, tokens: int) -> float:
    """All sends of one step: the communication of every stage."""
    return pp * float(cost_of(pp).tables.comm[tokens]) * 1e-9


@pytest.mark.parametrize("pp", [2, 4])
def test_a_lone_request_pays_all_stages_and_sends(pp: int) -> None:
    workload = "constant:rate=1,n=1,prompt=1000,output=50"
    one, many = run(1, workload), run(pp, workload)
    for metric, tokens in (("ttft_s", 1000), ("tpot_s", 1)):
        alone, piped = one[metric]["mean"], many[metric]["mean"]
        assert piped == pytest.approx(alone + sends_s(pp, tokens), rel=0.005)
        assert piped > alone


def test_only_the_last_stage_computes_logits() -> None:
    cost = cost_of(4)
    shape = StepShape(16, 16 * 500, 16 * 500**2, (), 16)
    first, *middle, last = cost.stages_ns(shape)
    assert middle == [first, first]
    assert last == cost.step_ns(shape)
    head = float(cost.tables.head[16])
    assert last - first == pytest.approx(head, abs=1)
    drafts = replace(shape, decode_tokens=48)
    assert cost_of(4, num_speculative_tokens=2).stages_ns(drafts)[0] < last


def test_only_the_last_stage_drafts() -> None:
    target = cost_of(2, num_speculative_tokens=2, spec_method="draft_model")
    cost = with_draft(target, model("llama-3.2-1b"))
    shape = StepShape(4, 4 * 500, 4 * 500**2, (), 4, 12)
    first, last = cost.stages_ns(shape)
    assert first == target.stages_ns(shape)[0]
    assert last == cost.step_ns(shape) > target.step_ns(shape)


def test_a_full_pipeline_has_the_throughput_of_its_slowest_stage() -> None:
    """64 requests in two halves, each half in one stage: a round of decodes takes two stages."""
    workload = "constant:rate=100000,n=64,prompt=64,output=400"
    summary = run(2, workload, max_num_seqs=64, max_num_batched_tokens=64 * 64)
    cost = cost_of(2)
    half = StepShape(32, 32 * 264, 32 * 264**2, (), 32)
    slowest = max(cost.stages_ns(half))
    assert summary["tpot_s"]["mean"] == pytest.approx(2 * slowest * 1e-9, rel=0.03)
