"""KV blocks against the counts published with real deployments, and models that do not fit."""

from __future__ import annotations

import pytest

from sim.cost.hardware import gpu
from sim.cost.memory import plan_memory
from sim.cost.models import model
from sim.engine.config import EngineConfig
from sim.errors import UserError

# (model, GPU, tp, max_num_batched_tokens, published blocks), vLLM 0.15, utilisation 0.9, 128
# sequences; ground_truth/experiments_open.json.
PUBLISHED = [
    ("Llama-2-7B", "h100", 1, 2048, 7462),
    ("Llama-2-70B", "h100", 4, 2048, 31356),
    ("Mixtral-8x7B", "h100", 2, 2048, 27510),
    ("CodeLlama-34B", "h100", 2, 2048, 26602),
    ("Llama-4-Scout", "h100", 2, 2048, 8253),
    ("Llama-3.1-70B", "h100", 4, 8192, 30251),
    ("Llama-3.1-70B", "h100", 4, 2048, 30425),
    ("Mistral-Nemo-12B", "h100", 2, 1024, 48009),
    ("Mistral-Nemo-12B", "h100", 1, 2048, 19251),
    ("Qwen2.5-7B", "h100", 1, 2048, 65352),
    ("Yi-34B", "h100", 2, 2048, 20793),
]


@pytest.mark.parametrize(("name", "card", "tp", "budget", "blocks"), PUBLISHED)
def test_kv_blocks_are_the_published_ones(
    name: str, card: str, tp: int, budget: int, blocks: int
) -> None:
    engine = EngineConfig(
        tensor_parallel_size=tp,
        max_num_batched_tokens=budget,
        max_num_seqs=128,
        max_model_len=4096,
        gpu_memory_utilization=0.9,
        enable_expert_parallel=name == "Llama-4-Scout",
    )
    planned = plan_memory(model(name), gpu(card), engine, version=(0, 15))
    assert planned.num_blocks == pytest.approx(blocks, rel=0.01)


def test_memory_parts_sum_to_what_was_requested() -> None:
    memory = plan_memory(model("llama-3-8b"), gpu("a100-80g"), EngineConfig(max_num_seqs=256))
    parts = memory.weights + memory.activations + memory.other + memory.kv_bytes
    assert parts == pytest.approx(memory.requested)
    assert memory.num_blocks == memory.kv_bytes // memory.block_bytes


def test_model_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(UserError, match=r"Llama-3-70B does not fit 1 x A100-80G: .*GB short"):
        plan_memory(model("llama-3-70b"), gpu("a100-80g"), EngineConfig())


def test_impossible_division_is_an_error() -> None:
    with pytest.raises(UserError, match="tensor_parallel_size 3"):
        plan_memory(model("llama-3-8b"), gpu("h100"), EngineConfig(tensor_parallel_size=3))
