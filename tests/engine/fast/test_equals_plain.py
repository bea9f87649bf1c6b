"""The fast engine is the plain engine, value for value: on random cases and on real traces.

Many more random cases: `python -m tests.engine.fast.fuzz --cases 10000 --seed 1000000`.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

import traces
from sim.engine.config import EngineConfig
from sim.engine.fast import FastEngine
from sim.engine.plain import PlainEngine
from sim.request import Request
from tests.engine.fast.double import LinearCost
from tests.engine.fast.drive import Script, run
from tests.engine.fast.fuzz import first_difference, random_case, verdict

A100 = LinearCost(9_000_000, 80_000, 82 << 10, 0, 2 << 10)


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_cases(first: int):
    for seed in range(first, first + 25):
        assert verdict(random_case(seed)) is None, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(5_000, 9_000, 500))
def test_many_random_cases(first: int):
    for seed in range(first, first + 500):
        assert verdict(random_case(seed)) is None, f"seed {seed}"


def first_requests(path: Path, count: int) -> list[Request]:
    return list(islice(traces.load(path), count))


def assert_equal(config: EngineConfig, requests: list[Request]) -> None:
    plain = run(PlainEngine(config, A100), Script(requests))
    fast = run(FastEngine(config, A100), Script(requests))
    assert plain == fast, first_difference(plain, fast)
    assert sum(plain["log num_preempted"]) > 0


@pytest.mark.shared
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
def test_azure_conversations_under_shortage(shared_dir: Path, asynchronous: bool, caching: bool):
    requests = first_requests(shared_dir / "traces/AzureLLMInferenceTrace_conv.csv", 500)
    config = EngineConfig(
        max_model_len=16_384,
        num_gpu_blocks=2_501,
        enable_prefix_caching=caching,
        async_scheduling=asynchronous,
        policy="fcfs" if asynchronous else "priority",
    )
    assert_equal(config, requests)


@pytest.mark.shared
def test_mooncake_conversations_share_prefixes(shared_dir: Path):
    requests = first_requests(shared_dir / "traces/mooncake_conversation_trace.jsonl.gz", 120)
    config = EngineConfig(
        max_model_len=131_072,
        num_gpu_blocks=9_001,
        max_num_seqs=64,
        scheduler_reserve_full_isl=False,
    )
    assert_equal(config, requests)
