"""Random cases for the scheduler, compared with an installed vLLM where there is one.

    python -m tests.conformance.fuzz --count 500
    python -m tests.conformance.fuzz --count 500 --oracle-python PATH --oracle-script PATH

The first form runs every case with all audits on. The second also records each case with the
real scheduler (`oracle.py`, in the environment of that interpreter) and reports differences, cut
down to few requests and settings.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.conformance.harness import Run

Record = dict[str, Any]

MAX_STEPS = 4000


def random_case(seed: int, large: bool = False) -> Record:
    """A small case (or a larger one) that any of the engine's settings may be part of."""
    rng = random.Random(seed)
    config = _random_config(rng)
    timed = rng.random() < 0.4
    count = rng.choice([2, 3, 4, 6, 8, 10, 14, 20])
    spread = rng.choice([0, 2, 8, 25, 60])
    if large:
        count, spread = count * 5, spread * 8
        config["num_gpu_blocks"] *= 3
    capacity = (config["num_gpu_blocks"] - 1) * config["block_size"]
    longest = max(2, min(capacity, config["max_model_len"]) - 1)
    requests: list[Record] = []
    for uid in range(count):
        request = _random_request(rng, uid, requests, longest, config)
        arrival = rng.randint(0, spread)
        if timed:
            request["arrival_time"] = arrival * rng.choice([0.25, 0.125, 1.0])
        else:
            request["arrival_step"] = arrival
        requests.append(request)
    if rng.random() < 0.6:
        config["num_gpu_blocks"] = _tight_blocks(rng, requests, config)
    if rng.random() < 0.5:
        rng.shuffle(requests)
    case: Record = {"name": f"fuzz_{seed}", "max_steps": MAX_STEPS, "config": config}
    if timed:
        case["step_time"] = {
            "a": rng.choice([0.0625, 0.25, 1.0]),
            "b": rng.choice([0.0, 2**-10, 2**-7]),
        }
    if rng.random() < 0.3:
        horizon = 2 * spread + 20
        case["aborts"] = sorted(
            [rng.randint(0, horizon), rng.choice(requests)["id"]] for _ in range(rng.randint(1, 4))
        )
    case["record_free_queue"] = True
    case["requests"] = requests
    return case


def _random_config(rng: random.Random) -> Record:
    block_size = rng.choice([1, 2, 3, 4, 7, 8, 8, 16, 16, 16, 16, 32, 64])
    config: Record = {
        "block_size": block_size,
        "num_gpu_blocks": rng.randint(3, 40) if block_size > 3 else rng.randint(20, 300),
        "max_num_seqs": rng.choice([1, 2, 3, 4, 6, 8, 16]),
        "max_model_len": rng.choice([40, 64, 100, 200, 512, 4096]),
        "enable_prefix_caching": rng.random() < 0.75,
        "async_scheduling": rng.random() < 0.5,
        "policy": "priority" if rng.random() < 0.4 else "fcfs",
        "scheduler_reserve_full_isl": rng.random() < 0.6,
    }
    config["max_num_batched_tokens"] = max(
        config["max_num_seqs"], rng.choice([4, 8, 16, 24, 32, 48, 64, 100, 128, 512])
    )
    if rng.random() < 0.15:
        config["enable_chunked_prefill"] = False
        config["max_num_batched_tokens"] = max(
            config["max_num_batched_tokens"], config["max_model_len"]
        )
    if rng.random() < 0.15:
        config["max_num_scheduled_tokens"] = rng.randint(1, config["max_num_batched_tokens"] + 4)
    if rng.random() < 0.3:
        config["long_prefill_token_threshold"] = min(
            rng.choice([1, 3, 8, 16, 20, 40, 64]), config["max_model_len"]
        )
        config["long_prefill_token_threshold_adaptive"] = rng.random() < 0.4
    if rng.random() < 0.2:
        config["max_num_active_seqs"] = rng.randint(1, config["max_num_seqs"])
    if rng.random() < 0.3:
        config["watermark"] = rng.choice([0.01, 0.05, 0.1, 0.3, 0.6])
    if rng.random() < 0.25:
        config["prefill_schedule_interval"] = rng.choice([2, 3, 4, 7])
    if rng.random() < 0.25:
        config["sliding_window"] = rng.choice([1, 2, 5, 8, 16, 17, 30, 64, 100])
    if rng.random() < 0.45:
        config["num_speculative_tokens"] = rng.choice([1, 2, 3, 4, 5])
        config["spec_method"] = rng.choice(
            ["eagle", "draft_model"]
            if config["async_scheduling"]
            else ["ngram", "eagle", "draft_model"]
        )
        config["max_num_batched_tokens"] = max(
            config["max_num_batched_tokens"], config["num_speculative_tokens"] + 1
        )
    return config


def _tight_blocks(rng: random.Random, requests: list[Record], config: Record) -> int:
    """Blocks for the longest request and little more, so that sequences preempt each other."""
    lookahead = config.get("num_speculative_tokens", 0)
    longest = max(
        sum(segment[3] for segment in request["prompt"]) + request["output_len"]
        for request in requests
    )
    tokens = min(longest, config["max_model_len"]) + lookahead
    blocks = -(-tokens // config["block_size"])
    return int(blocks * rng.choice([1, 1, 1.25, 1.5, 2])) + rng.randint(1, 3)


def _random_request(
    rng: random.Random, uid: int, before: list[Record], longest: int, config: Record
) -> Record:
    wanted = min(longest, rng.choice([1, 2, 5, 16, 17, 32, 33, 48, 64, 80, 120, 200]))
    request: Record = {
        "id": f"r{uid:04d}",
        "uid": uid,
        "prompt": _random_prompt(rng, uid, before, max(1, rng.randint(wanted // 2, wanted))),
        "output_len": rng.choice([1, 1, 2, 3, 5, 8, 12, 16, 20, 40, 60]),
    }
    prompt = sum(segment[3] for segment in request["prompt"])
    if rng.random() < 0.9:  # else the engine cuts it, or it never fits and the run gets stuck
        request["output_len"] = max(1, min(request["output_len"], longest - prompt))
    if config["policy"] == "priority" and rng.random() < 0.8:
        request["priority"] = rng.randint(-1, 3)
    if rng.random() < 0.1:
        request["cache_salt"] = rng.choice(["A", "B"])
    if rng.random() < 0.1:
        request["lora"] = rng.randint(1, 2)
    if config.get("num_speculative_tokens"):
        k = config["num_speculative_tokens"]
        request["accept"] = [rng.randint(0, k) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.4:
            request["draft"] = [rng.randint(0, k) for _ in range(rng.randint(1, 4))]
    return request


def _random_prompt(
    rng: random.Random, uid: int, before: list[Record], length: int
) -> list[list[Any]]:
    """Shared text, an earlier conversation with its outputs, private text; in odd pieces."""
    segments: list[list[Any]] = []
    kind = rng.random()
    if kind < 0.4:
        segments.append(["g", rng.randint(0, 1), 0, rng.randint(1, length)])
    elif kind < 0.7 and before:
        earlier = rng.choice(before)
        segments += [list(segment) for segment in earlier["prompt"]]
        if rng.random() < 0.8:
            segments.append(["o", earlier["uid"], 0, rng.randint(1, earlier["output_len"])])
    segments = _cut(segments, length)
    missing = length - sum(segment[3] for segment in segments)
    if missing:
        segments.append(["u", uid, 0, missing])
    if rng.random() < 0.2:
        segments = [piece for segment in segments for piece in _split(rng, segment)]
    return segments


def _cut(segments: list[list[Any]], length: int) -> list[list[Any]]:
    kept = []
    for kind, ident, start, size in segments:
        size = min(size, length)
        if size:
            kept.append([kind, ident, start, size])
        length -= size
    return kept


def _split(rng: random.Random, segment: list[Any]) -> list[list[Any]]:
    kind, ident, start, length = segment
    if length < 2:
        return [segment]
    at = rng.randint(1, length - 1)
    return [[kind, ident, start, at], [kind, ident, start + at, length - at]]


class Oracle:
    """The real scheduler in a process of its own, one case after another."""

    def __init__(self, python: str, script: str) -> None:
        recorder = Path(__file__).with_name("recorder.py")
        self._process = subprocess.Popen(
            [python, str(recorder), script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def record(self, case: Record) -> Record:
        """{"text": the document} or {"error": why there is none}."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the oracle process ended")
        answer: Record = json.loads(line)
        return answer


def run(case: Record) -> Record:
    """The same for the scheduler under test."""
    try:
        return {"text": Run(case, check=True).run().document()}
    except (AssertionError, RuntimeError, IndexError, KeyError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def differs(case: Record, oracle: Oracle) -> bool:
    """Whether the two disagree about a case that the real scheduler gets through."""
    expected = oracle.record(case)
    ran = "text" in expected or expected["error"].startswith("RuntimeError")
    return ran and run(case) != expected


def minimise(case: Record, oracle: Oracle) -> Record:
    """Leave out requests, aborts and settings as long as the difference stays."""
    shrinking = True
    while shrinking:
        shrinking = False
        for smaller in _smaller(case):
            if differs(smaller, oracle):
                case, shrinking = smaller, True
                break
    return case


def _smaller(case: Record) -> list[Record]:
    smaller = []
    for i in range(len(case["requests"])):
        rest = case["requests"][:i] + case["requests"][i + 1 :]
        if rest:
            smaller.append({**case, "requests": rest})
    for key in case["config"]:
        rest = {k: v for k, v in case["config"].items() if k != key}
        smaller.append({**case, "config": rest})
    if case.get("aborts"):
        for i in range(len(case["aborts"])):
            smaller.append({**case, "aborts": case["aborts"][:i] + case["aborts"][i + 1 :]})
    for i, request in enumerate(case["requests"]):
        changes = [{k: v for k, v in request.items() if k != "lora"}] if "lora" in request else []
        if request["output_len"] > 1:
            changes.append({**request, "output_len": request["output_len"] // 2})
        for changed in changes:
            requests = [*case["requests"][:i], changed, *case["requests"][i + 1 :]]
            smaller.append({**case, "requests": requests})
    return smaller


def first_difference(got: Record, expected: Record) -> str:
    if "error" in got:
        return f"got   {got['error']}"
    for a, b in zip(got["text"].split("\n"), expected["text"].split("\n"), strict=False):
        if a != b:
            return f"got   {a[:2000]}\nvLLM  {b[:2000]}"
    return "one is longer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--large", action="store_true", help="more requests per case")
    parser.add_argument("--oracle-python", help="interpreter with vLLM 0.33.0")
    parser.add_argument("--oracle-script", help="oracle.py")
    parser.add_argument("--stop-after", type=int, default=3, help="differences to report")
    parser.add_argument("--keep", type=Path, help="folder for the cases that differ")
    args = parser.parse_args()
    oracle = Oracle(args.oracle_python, args.oracle_script) if args.oracle_python else None
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    for seed in range(args.start, args.start + args.count):
        case = random_case(seed, args.large)
        if oracle is None:
            outcomes[run(case).get("error", "ran").split(" at ")[0]] += 1
            continue
        expected = oracle.record(case)
        if run(case) == expected:
            outcomes["same" if "text" in expected else "same, stuck or livelocked"] += 1
            continue
        if "error" in expected and not expected["error"].startswith("RuntimeError"):
            outcomes["vLLM refuses: " + expected["error"].split("\n")[0][:70]] += 1
            continue
        outcomes["DIFFERENT"] += 1
        small = minimise(case, oracle)
        print(f"seed {seed}:", json.dumps(small), flush=True)
        print(first_difference(run(small), oracle.record(small)), flush=True)
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
            (args.keep / f"{case['name']}.case.json").write_text(json.dumps(small))
        if outcomes["DIFFERENT"] >= args.stop_after:
            break
    for outcome, number in outcomes.most_common():
        print(f"{number:7d} {outcome}")
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(bool(outcomes["DIFFERENT"]))


if __name__ == "__main__":
    main()
