"""Random cases on which the fast engine must equal the plain one, value for value.

    python -m tests.engine.fast.fuzz --cases 2000 --seed 0

A difference is cut down to few requests and settings before it is printed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sim.engine.config import EngineConfig
from sim.engine.fast import FastEngine
from sim.engine.plain import PlainEngine
from sim.protocols import RequestView, SchedulerView, SchedulingPolicy
from sim.request import Request, Segment, output_key, prompt_key
from tests.engine.fast.double import LinearCost
from tests.engine.fast.drive import Script, run

MAX_STEPS = 20_000


@dataclass
class Shortest(SchedulingPolicy):
    """Shortest known text first."""

    order = "key"
    watermark: float | None = None

    def key(self, request: RequestView, view: SchedulerView) -> Any:
        return request.num_tokens + 100 * request.num_preemptions


@dataclass
class Onlooker(SchedulingPolicy):
    """Its keys depend on all that can be seen."""

    order = "key"

    def key(self, request: RequestView, view: SchedulerView) -> Any:
        seen = [
            view.now_ns,
            view.num_free_blocks,
            view.cached_tokens(request),
            view.blocks_needed(request, 7),
            request.num_computed_tokens,
            request.num_output_tokens,
        ]
        for other in (*view.waiting, *view.running):
            seen += (other.request.uid, other.num_tokens, other.num_output_tokens)
        return hash(tuple(seen)) % 5


POLICIES: dict[str, Callable[[], SchedulingPolicy | None]] = {
    "": lambda: None,
    "shortest": Shortest,
    "shortest, watermark": lambda: Shortest(watermark=0.2),
    "onlooker": Onlooker,
}


@dataclass
class Case:
    """One configuration, one cost model, one script."""

    config: dict[str, Any]
    cost: dict[str, int]
    policy: str = ""
    """Key of `POLICIES`."""
    script: Script = field(default_factory=lambda: Script([]))


def random_case(seed: int) -> Case:
    """A small case, rich in what can go wrong: shortage, sharing, priorities, aborts at any time,
    arrivals exactly when a step ends."""
    rng = random.Random(seed)
    config = _random_config(rng)
    cost = _random_cost(rng)
    count = rng.choice([1, 2, 3, 4, 6, 8, 12, 20, 40])
    step = cost["base"] + cost["per_token"]
    spread = rng.choice([0, 2, 10, 30, 100]) * step
    capacity = (config["num_gpu_blocks"] - 1) * config["block_size"]
    longest = max(2, min(capacity, config["max_model_len"]) - 1)
    requests: list[Request] = []
    aligned = rng.random() < 0.5
    for uid in range(count):
        arrival = rng.randint(0, spread)
        if aligned:
            arrival -= arrival % step
        requests.append(_random_request(rng, uid, arrival, requests, longest, config))
    follow_ups = {}
    if rng.random() < 0.3:
        for request in requests[: rng.randint(1, count)]:
            uid = count + len(follow_ups)
            turn = _next_turn(rng, uid, request, longest)
            if turn is not None:
                follow_ups[request.uid] = (rng.choice([0, 1, step, 7 * step]), turn)
    requests.sort(key=lambda r: r.arrival_ns)
    horizon = spread + 60 * step
    aborts = []
    if rng.random() < 0.4:
        uids = [r.uid for r in requests] + [r.uid for _, r in follow_ups.values()]
        for _ in range(rng.randint(1, 6)):
            when = rng.randint(0, horizon)
            aborts.append((when - when % step if aligned else when, rng.choice(uids)))
    questions = [rng.randint(0, horizon) for _ in range(rng.choice([0, 0, 5, 40]))]
    until = rng.randint(0, horizon) if rng.random() < 0.2 else None
    policy = rng.choice(["", "", "", "", *POLICIES])
    return Case(config, cost, policy, Script(requests, aborts, questions, follow_ups, until))


def _random_config(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice([1, 2, 3, 4, 7, 8, 8, 16, 16, 16])
    config: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks": rng.randint(3, 40) if block_size > 3 else rng.randint(20, 300),
        "max_num_seqs": rng.choice([1, 2, 3, 4, 6, 8, 16, 32]),
        "max_model_len": rng.choice([40, 64, 100, 200, 512, 4096]),
        "enable_prefix_caching": rng.random() < 0.6,
        "async_scheduling": rng.random() < 0.6,
        "policy": "priority" if rng.random() < 0.3 else "fcfs",
        "scheduler_reserve_full_isl": rng.random() < 0.6,
    }
    if rng.random() < 0.3:
        config["num_gpu_blocks"] += rng.choice([50, 200, 1000])
    config["max_num_batched_tokens"] = max(
        config["max_num_seqs"], rng.choice([4, 8, 16, 24, 32, 48, 64, 100, 128, 512])
    )
    if rng.random() < 0.15:
        config["enable_chunked_prefill"] = False
        config["max_num_batched_tokens"] = max(
            config["max_num_batched_tokens"], config["max_model_len"]
        )
    elif rng.random() < 0.12:
        config["max_num_scheduled_tokens"] = rng.randint(1, config["max_num_batched_tokens"] + 4)
    if rng.random() < 0.2:
        config["long_prefill_token_threshold"] = min(
            rng.choice([1, 3, 8, 16, 20, 40, 64]), config["max_model_len"]
        )
        config["long_prefill_token_threshold_adaptive"] = rng.random() < 0.4
    if rng.random() < 0.15:
        config["max_num_active_seqs"] = rng.randint(1, config["max_num_seqs"])
    if rng.random() < 0.25:
        config["watermark"] = rng.choice([0.01, 0.05, 0.1, 0.3, 0.6])
    return config


def _random_cost(rng: random.Random) -> dict[str, int]:
    return {
        "base": rng.choice([1, 10, 100, 1000]),
        "per_token": rng.choice([0, 0, 1, 10]),
        "per_context": rng.choice([0, 0, 100, 1 << 10]),
        "per_context_sq": rng.choice([0, 0, 3]),
        "per_area": rng.choice([0, 0, 7]),
    }


def _random_request(
    rng: random.Random,
    uid: int,
    arrival: int,
    before: list[Request],
    longest: int,
    config: dict[str, Any],
) -> Request:
    wanted = min(longest, rng.choice([1, 2, 5, 16, 17, 32, 33, 48, 64, 80, 120, 200]))
    prompt = max(1, rng.randint(wanted // 2, wanted))
    segments = _random_prompt(rng, uid, before, prompt)
    output = rng.choice([1, 1, 2, 3, 5, 8, 12, 16, 20, 40, 100])
    if rng.random() < 0.9:  # else it is cut short, or turned away
        output = max(1, min(output, longest - prompt))
    return Request(
        uid=uid,
        id=f"r{rng.randint(0, 9)}-{uid}",
        arrival_ns=arrival,
        prompt_tokens=prompt,
        output_tokens=output,
        segments=segments,
        priority=rng.randint(-1, 3) if rng.random() < 0.8 else 0,
        max_tokens=output + rng.choice([0, 1, 2, 50]) if rng.random() < 0.3 else None,
        cache_salt=rng.choice(["A", "B"]) if rng.random() < 0.1 else None,
        lora=rng.choice(["x", "y"]) if rng.random() < 0.1 else None,
    )


def _random_prompt(
    rng: random.Random, uid: int, before: list[Request], length: int
) -> tuple[Segment, ...] | None:
    """Shared text, an earlier conversation with its outputs, private text; in odd pieces."""
    segments: list[Segment] = []
    kind = rng.random()
    if kind < 0.3:
        return None
    if kind < 0.55:
        segments.append(Segment(rng.randint(0, 1), 0, rng.randint(1, length)))
    elif kind < 0.85 and before:
        earlier = rng.choice(before)
        segments += earlier.prompt_segments()
        if rng.random() < 0.8:
            segments.append(
                Segment(output_key(earlier.uid), 0, rng.randint(1, earlier.output_tokens))
            )
    elif kind < 0.9:  # the output of somebody who may come later, or of itself
        segments += [
            Segment(prompt_key(rng.randint(0, uid + 3)), 0, rng.randint(1, length)),
            Segment(output_key(rng.randint(0, uid + 3)), 0, rng.randint(1, length)),
        ]
    segments = _cut(segments, length)
    missing = length - sum(segment.length for segment in segments)
    if missing:
        segments.append(Segment(prompt_key(uid), 0, missing))
    if rng.random() < 0.2:
        segments = [piece for segment in segments for piece in _split(rng, segment)]
    return tuple(segments)


def _next_turn(rng: random.Random, uid: int, request: Request, longest: int) -> Request | None:
    """The same conversation, one turn later."""
    said = rng.randint(1, request.output_tokens)
    segments = [*request.prompt_segments(), Segment(output_key(request.uid), 0, said)]
    new = rng.randint(1, 20)
    segments.append(Segment(prompt_key(uid), 0, new))
    prompt = request.prompt_tokens + said + new
    if prompt >= longest:
        return None
    return Request(
        uid=uid,
        id=f"turn-{uid}",
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=max(1, min(rng.choice([1, 4, 17, 30]), longest - prompt)),
        segments=tuple(segments),
        priority=request.priority,
        cache_salt=request.cache_salt,
        lora=request.lora,
    )


def _cut(segments: list[Segment], length: int) -> list[Segment]:
    kept = []
    for content, start, size in segments:
        size = min(size, length)
        if size:
            kept.append(Segment(content, start, size))
        length -= size
    return kept


def _split(rng: random.Random, segment: Segment) -> list[Segment]:
    content, start, length = segment
    if length < 2:
        return [segment]
    at = rng.randint(1, length - 1)
    return [Segment(content, start, at), Segment(content, start + at, length - at)]


# -- comparison


class Stepped(PlainEngine):
    """The plain engine, which gives up on vLLM's livelocks."""

    def advance(self, now: int) -> None:
        super().advance(now)
        if len(self.log) > MAX_STEPS:
            raise Livelock


class Livelock(Exception):
    """vLLM would preempt the same requests for ever."""


def outcomes(case: Case, check: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the plain and the fast engine make of a case."""
    config = EngineConfig(**case.config)
    cost = LinearCost(**case.cost)
    make = POLICIES[case.policy]
    plain = run(Stepped(config, cost, make()), copy.deepcopy(case.script))
    fast = run(FastEngine(config, cost, make()), copy.deepcopy(case.script), check)
    return plain, fast


def verdict(case: Case, check: bool = True) -> str | None:
    """None when both agree, or vLLM itself would not come to an end; else what differs."""
    try:
        plain, fast = outcomes(case, check)
    except Livelock:
        return None
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} {error} ({where.filename}:{where.lineno})"
    return "differs: " + first_difference(plain, fast) if plain != fast else None


def first_difference(plain: dict[str, Any], fast: dict[str, Any]) -> str:
    keys = [k for k in plain if plain[k] != fast[k]]
    rows = {}
    for key in keys:
        if isinstance(plain[key], list):
            pairs = list(zip(plain[key], fast[key], strict=False))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            rows[key] = (at, plain[key][at : at + 3], fast[key][at : at + 3])
        else:
            rows[key] = (0, plain[key], fast[key])
    lines = [f"  {key} [{at}]: plain {a} fast {b}" for key, (at, a, b) in rows.items()]
    return f"{keys}\n" + "\n".join(lines)


def minimise(case: Case) -> Case:
    """Leave out requests, events and settings as long as there is a finding of the same kind."""
    kind = (verdict(case) or "").split(" ")[0]
    shrinking = True
    while shrinking:
        shrinking = False
        for smaller in _smaller(case):
            found = verdict(smaller)
            if found is not None and found.split(" ")[0] == kind:
                case, shrinking = smaller, True
                break
    return case


def _smaller(case: Case) -> list[Case]:
    script = case.script
    smaller = []

    def scripts(**changes: Any) -> None:
        smaller.append(dataclasses.replace(case, script=dataclasses.replace(script, **changes)))

    for name in ("requests", "aborts", "questions"):
        events = getattr(script, name)
        if len(events) > 4:
            half = len(events) // 2
            scripts(**{name: events[:half]})
            scripts(**{name: events[half:]})
        for i in range(len(events)):
            scripts(**{name: events[:i] + events[i + 1 :]})
    if case.policy:
        smaller.append(dataclasses.replace(case, policy=""))
    for uid in script.follow_ups:
        scripts(follow_ups={k: v for k, v in script.follow_ups.items() if k != uid})
    if script.until is not None:
        scripts(until=None)
    for key in case.config:
        if key != "num_gpu_blocks":
            rest = {k: v for k, v in case.config.items() if k != key}
            try:
                EngineConfig(**rest)
            except Exception:
                continue
            smaller.append(dataclasses.replace(case, config=rest))
    for key, value in case.cost.items():
        if value and key != "base":
            smaller.append(dataclasses.replace(case, cost={**case.cost, key: 0}))
    for i, request in enumerate(script.requests):
        changes: list[dict[str, Any]] = []
        if request.output_tokens > 1:
            changes.append({"output_tokens": request.output_tokens // 2})
            changes.append({"output_tokens": request.output_tokens - 1})
        for name in ("lora", "cache_salt", "max_tokens", "segments"):
            if getattr(request, name) is not None:
                changes.append({name: None})
        for change in changes:
            changed = dataclasses.replace(request, **change)
            scripts(requests=[*script.requests[:i], changed, *script.requests[i + 1 :]])
    return smaller


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--stop-after", type=int, default=1, help="differences to report")
    args = parser.parse_args()
    started = time.monotonic()
    findings: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.cases):
        found = verdict(random_case(seed))
        if found is None:
            continue
        findings[found.split("\n")[0][:80]] += 1
        small = minimise(random_case(seed))
        print(f"seed {seed}: {small}\n{verdict(small)}", flush=True)
        if findings.total() >= args.stop_after:
            break
    print(f"{seed + 1 - args.seed} cases, {findings.total()} findings", end="")
    print(f", {time.monotonic() - started:.0f} s")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
