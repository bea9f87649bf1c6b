"""`--no-fast-forward` gives the same summary, requests and steps: whole scenarios, at random."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sim import Result, Scenario, simulate

MORE = int(os.environ.get("FUZZ", "1"))
MOONCAKE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_trace.jsonl.gz"


def some_requests(rng: random.Random) -> dict[str, Any]:
    if MOONCAKE.exists() and rng.random() < 0.2:
        return {
            "trace": MOONCAKE,
            "model": "llama-3.1-8b",
            "limit": rng.randint(1, 60),
            "rate_scale": rng.choice([1, 3, 30]),
            "start_s": rng.randint(0, 600),
        }
    arrivals = rng.choice(["poisson:rate=20", "constant:rate=200", "gamma:rate=30,cv=3"])
    prompt = rng.choice(["17", "uniform(1,64)", "uniform(1,150)", "uniform(1,2000)"])
    output = rng.choice(["1", "uniform(1,100)", "uniform(50,150)", "64"])
    more = rng.choice(["", ",system=2x64", ",system=prompts(6,48,zipf=1,share=0.7)"])
    more += rng.choice(["", ",priorities=mix(0=0.5,1=0.3,-3=0.2)"])
    count = rng.randint(3, 60)
    return {"generate": f"{arrivals},n={count},prompt={prompt},output={output}{more}"}


def some_scenario(rng: random.Random) -> Scenario:
    fields = some_requests(rng)
    block = rng.choice([1, 4, 16])
    engine: dict[str, Any] = {
        "max_num_seqs": rng.choice([1, 4, 16, 64]),
        "max_num_batched_tokens": rng.choice([64, 256, 2048]),
    }
    if "generate" in fields and rng.random() < 0.7:  # few blocks: preemptions, evictions
        engine["block_size"] = block
        engine["num_gpu_blocks"] = rng.choice([300, 600, 1200]) // block + rng.randint(2, 40)
    for name, values in {
        "async_scheduling": [True, False],
        "enable_prefix_caching": [True, False],
        "long_prefill_token_threshold": [1, 16, 100],
        "long_prefill_token_threshold_adaptive": [True],
        "watermark": [0.01, 0.1, 0.5],
        "scheduler_reserve_full_isl": [False],
        "max_num_scheduled_tokens": [5, 64],
    }.items():
        if rng.random() < 0.35:
            engine[name] = rng.choice(values)
    fields["engine"] = engine
    for name, value in {
        "policy": "priority",
        "cluster": {"replicas": rng.choice([2, 3])},
        "routing": "least-requests",
        "client": {"timeout_s": rng.choice([0.001, 0.5, 3])},
        "horizon_s": rng.choice([0.5, 5]),
        "admission": {"name": "queue-limit", "max_requests": rng.choice([1, 5, 20])},
        "slo": {"ttft_s": 1, "tpot_s": 0.05},
        "warm_up_s": 0.3,
    }.items():
        if rng.random() < 0.25:
            fields[name] = value
    return Scenario.of(seed=rng.randint(0, 9), capacity_probe=rng.random() < 0.15, **fields)


def told(result: Result) -> dict[str, Any]:
    """The summary, without what says how it was found."""
    summary = dict(result.summary)
    summary["run"] = {k: v for k, v in summary["run"].items() if k not in ("engine", "events")}
    return summary


@pytest.mark.parametrize("seed", range(30 * MORE))
def test_the_answer_is_the_same(seed: int) -> None:
    scenario = some_scenario(random.Random(seed))
    fast = simulate(scenario)
    walked = simulate(scenario.with_({"fast_forward": False}))
    assert fast.summary["run"]["engine"] == "fast"
    assert walked.summary["run"]["engine"] == "plain"
    assert told(fast) == told(walked)
    pd.testing.assert_frame_equal(fast.requests, walked.requests)
    pd.testing.assert_frame_equal(fast.steps, walked.steps)
    counts = fast.summary["requests"]
    served = sum(counts[k] for k in ("completed", "rejected", "aborted", "unfinished"))
    assert served == counts["total"]
