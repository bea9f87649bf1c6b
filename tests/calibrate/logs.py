"""Logs of servers made by the simulator, in the layouts of the load generators."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calibrate.logs.parameters import with_fit
from sim import Scenario, simulate
from sim.cost.hardware import gpu
from sim.cost.profile import for_gpu, save
from sim.cost.server import ServerFit
from sim.result import Result

SERVER = ("--model", "Llama-3-8B", "--gpu", "a100-80g", "--set", "engine.max_num_seqs=64")
REQUESTS = "arrival=arrival_s,prompt=prompt_tokens,output=output_tokens,ttft=ttft_s,e2e=e2e_s"
STEPS = (
    "start=start_s,end=end_s,decodes=num_decodes,context=decode_context,prefills=num_prefills,"
    "context_sq=decode_context_sq,prefill_tokens=prefill_tokens,sampled=num_sampled"
)
LOAD = "poisson:rate=6,n={n},prompt=lognormal(600,1800,max=4000),output=lognormal(80,240,max=800)"


def serve(tmp_path: Path, truth: ServerFit | None, n: int = 150, **fields: Any) -> Result:
    """What a server with those scales and constants does."""
    given: dict[str, Any] = {
        "model": "Llama-3-8B",
        "gpu": "a100-80g",
        "engine": {"max_num_seqs": 64},
        "generate": LOAD.format(n=n),
        "capacity_probe": False,
    }
    if truth is not None:
        base = for_gpu(gpu("a100-80g"))
        path = tmp_path / "truth.json"
        save(replace(base, entries=with_fit(base, truth, {"model": "Llama-3-8B"})), path)
        given["cost"] = {"profile": str(path)}
    return simulate(Scenario.from_dict(given | fields))


def requests_csv(result: Result, path: Path, noise: float = 0.0) -> Path:
    table = result.requests
    rng = np.random.default_rng(0)
    for name in ("ttft_s", "e2e_s"):
        table[name] = table[name] * np.exp(noise * rng.standard_normal(len(table)))
    table["e2e_s"] = np.maximum(table["e2e_s"], table["ttft_s"])
    table.to_csv(path, index=False)
    return path


def steps_csv(result: Result, path: Path, noise: float = 0.0) -> Path:
    table: pd.DataFrame = result.steps
    rng = np.random.default_rng(0)
    # The step's own end stays on a clock of its own: only its length is noisy.
    length = (table.end_s - table.start_s) * np.exp(noise * rng.standard_normal(len(table)))
    table["end_s"] = table.start_s + length
    table.to_csv(path, index=False)
    return path


def vllm_bench(table: pd.DataFrame, **more: Any) -> dict[str, Any]:
    """As `vllm bench serve --save-result --save-detailed` saves them."""
    gaps = [
        [float(t)] * (int(n) - 1) if n > 1 else []
        for t, n in zip(table.tpot_s, table.output_tokens, strict=True)
    ]
    return {
        "date": "20261201-120000",
        "endpoint_type": "openai",
        "backend": "openai",
        "model_id": "meta-llama/Meta-Llama-3-8B",
        "num_prompts": len(table),
        "request_rate": 6.0,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": float(table.arrival_s.max()),
        "completed": len(table),
        "failed": 0,
        "mean_ttft_ms": float(1e3 * table.ttft_s.mean()),
        "request_throughput": 6.0,
        "input_lens": table.prompt_tokens.tolist(),
        "output_lens": table.output_tokens.tolist(),
        "ttfts": table.ttft_s.tolist(),
        "itls": gaps,
        "latencies": table.e2e_s.tolist(),
        "start_times": (7000.0 + table.arrival_s).tolist(),
        "generated_texts": ["x"] * len(table),
        "errors": [""] * len(table),
    } | more


def guidellm(table: pd.DataFrame, strategy: dict[str, Any] | None = None) -> dict[str, Any]:
    """As GuideLLM saves a benchmark with all its requests."""
    rows = [
        {
            "type_": "generative_request_stats",
            "request_id": f"r-{i}",
            "request_args": json.dumps({"body": {"prompt": f"text {i}"}}),
            "info": {
                "status": "completed",
                "timings": {
                    "request_start": 1.7e9 + r.arrival_s,
                    "first_token_iteration": 1.7e9 + r.arrival_s + r.ttft_s,
                    "last_token_iteration": 1.7e9 + r.arrival_s + r.e2e_s,
                    "request_end": 1.7e9 + r.arrival_s + r.e2e_s + 1e-4,
                },
            },
            "prompt_tokens": int(r.prompt_tokens),
            "output_tokens": int(r.output_tokens),
        }
        for i, r in enumerate(table.itertuples())
    ]
    return {
        "metadata": {"version": 1},
        "benchmarks": [
            {
                "type_": "generative_benchmark",
                "config": {"strategy": strategy or {"type_": "poisson", "rate": 6.0}},
                "metrics": {"request_totals": {"successful": len(rows), "total": len(rows)}},
                "requests": {"successful": rows, "errored": [], "incomplete": []},
            }
        ],
    }


def inference_perf(table: pd.DataFrame, usage: bool = True) -> list[dict[str, Any]]:
    """As inference-perf's per_request_lifecycle_metrics.json."""
    rows = []
    for i, r in enumerate(table.itertuples()):
        start = 500.0 + r.arrival_s
        response: dict[str, Any] = {
            "output_tokens": int(r.output_tokens) + 1,  # its own count of the text
            "output_token_times": [start + r.ttft_s, start + r.e2e_s],
        }
        if usage:
            response["server_usage"] = {"completion_tokens": int(r.output_tokens)}
        rows.append(
            {
                "start_time": start,
                "end_time": start + r.e2e_s,
                "request": json.dumps({"prompt": f"text {i}"}),
                "response": "x",
                "info": {
                    "request_metrics": {"text": {"input_tokens": int(r.prompt_tokens)}},
                    "response_metrics": response,
                    "input_tokens": int(r.prompt_tokens),
                },
                "error": None,
            }
        )
    return rows
