"""How fast is the fast engine? CPU time of its event loop alone, without SimPy.

    python -m tests.benchmarks.bench_fast_engine [--traces FOLDER] [--only NAME] [--profile]

Llama-3-8B on A100-80G or H100, by a linear stand-in for the cost model. Prints one line per case:
requests, rows of the step log, events, CPU seconds, microseconds per request.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import gzip
import json
import pstats
import resource
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from sim.engine.config import EngineConfig
from sim.engine.fast import FastEngine
from sim.engine.interface import RequestRecord
from sim.request import Request, Segment
from tests.engine.fast.double import LinearCost

A100 = LinearCost(9_000_000, 80_000, 82 << 10, 0, 2 << 10)
"""8B parameters at 1.8 TB/s; 200 TFLOP/s of prefill; 128 KiB of KV per token."""
H100 = LinearCost(6_000_000, 35_000, 45 << 10, 0, 1 << 10)


def serve(
    engines: Sequence[FastEngine], requests: Sequence[Request]
) -> tuple[float, int, list[RequestRecord]]:
    """CPU seconds, events and records of serving `requests`, round-robin over `engines`."""
    records: list[RequestRecord] = []
    for engine in engines:
        engine.on_finish = records.append
    events = 0
    started = time.process_time()
    for number, request in enumerate(requests):
        engine = engines[number % len(engines)]
        now = request.arrival_ns
        wake_ns = engine.wake_ns()
        while wake_ns is not None and wake_ns < now:
            engine.advance(wake_ns)
            events += 1
            wake_ns = engine.wake_ns()
        engine.submit(request, now)
    for engine in engines:
        while (wake_ns := engine.wake_ns()) is not None:
            engine.advance(wake_ns)
            events += 1
    return time.process_time() - started, events, records


def azure(path: Path, rate: float = 1.0) -> list[Request]:
    with path.open() as file:
        rows = [
            (
                datetime.fromisoformat(row["TIMESTAMP"][:26]),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
            for row in csv.DictReader(file)
        ]
    first = min(when for when, _, _ in rows)
    return [
        Request(i, str(i), int((when - first).total_seconds() * 1e9 / rate), prompt, output)
        for i, (when, prompt, output) in enumerate(sorted(rows))
    ]


def mooncake(path: Path) -> list[Request]:
    requests = []
    with gzip.open(path, "rt") as file:
        for i, line in enumerate(file):
            row = json.loads(line)
            left = row["input_length"]
            segments = []
            for content in row["hash_ids"]:
                segments.append(Segment(content, 0, min(left, 512)))
                left -= segments[-1].length
            requests.append(
                Request(
                    i,
                    str(i),
                    row["timestamp"] * 1_000_000,
                    row["input_length"],
                    row["output_length"],
                    tuple(segments),
                )
            )
    return requests


def poisson(count: int, rate: float, seed: int = 0) -> list[Request]:
    """Lengths like the Azure conversation trace's, arrivals at `rate` per second."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1e9 / rate, count)).astype(np.int64).tolist()
    prompts = np.clip(rng.lognormal(6.6, 1.0, count), 1, 14_000).astype(np.int64).tolist()
    outputs = np.clip(rng.lognormal(5.0, 0.9, count), 1, 1_500).astype(np.int64).tolist()
    return [
        Request(i, str(i), a, p, o)
        for i, (a, p, o) in enumerate(zip(arrivals, prompts, outputs, strict=True))
    ]


def a100(caching: bool) -> FastEngine:
    config = EngineConfig(
        max_model_len=16_384,
        num_gpu_blocks=27_001,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        enable_prefix_caching=caching,
        async_scheduling=True,
    )
    return FastEngine(config, A100)


def h100(caching: bool) -> FastEngine:
    config = EngineConfig(
        max_model_len=131_072,
        num_gpu_blocks=28_001,
        max_num_batched_tokens=8192,
        max_num_seqs=1024,
        enable_prefix_caching=caching,
        async_scheduling=True,
    )
    return FastEngine(config, H100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    conversation = args.traces / "AzureLLMInferenceTrace_conv.csv"
    cases: dict[str, tuple[Callable[[], list[Request]], Callable[[], list[FastEngine]]]] = {
        "azure conv": (lambda: azure(conversation), lambda: [a100(False)]),
        "azure conv, caching": (lambda: azure(conversation), lambda: [a100(True)]),
        "azure conv x1.5, overloaded": (lambda: azure(conversation, 1.5), lambda: [a100(False)]),
        "mooncake conv, 4 H100": (
            lambda: mooncake(args.traces / "mooncake_conversation_trace.jsonl.gz"),
            lambda: [h100(True) for _ in range(4)],
        ),
        "poisson 100k, 16 A100": (
            lambda: poisson(100_000, 64.0),
            lambda: [a100(False) for _ in range(16)],
        ),
        "poisson 1M, 16 A100": (
            lambda: poisson(1_000_000, 64.0),
            lambda: [a100(False) for _ in range(16)],
        ),
    }
    for name, (load, build) in cases.items():
        if args.only not in name:
            continue
        requests = load()
        for _ in range(args.repeat):
            engines = build()
            profile = cProfile.Profile() if args.profile else None
            if profile:
                profile.enable()
            cpu_s, events, records = serve(engines, requests)
            if profile:
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            rows = sum(len(engine.log) for engine in engines)
            count = len(requests)
            waited = sorted(
                r.first_scheduled_ns - r.queued_ns for r in records if r.first_token_ns >= 0
            )
            hits = sum(r.cached_tokens for r in records)
            prompts = sum(r.prompt_tokens for r in requests)
            preempted = sum(r.preemptions for r in records)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{name}: {count} requests, {rows} rows, {events} events, {cpu_s:.3f} CPU-s, "
                f"{1e6 * cpu_s / count:.1f} us/request; median wait "
                f"{waited[len(waited) // 2] / 1e9:.2f} s, hits {hits / prompts:.0%}, "
                f"{preempted} preemptions, peak {peak:.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
