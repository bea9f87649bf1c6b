"""The load of an experiment, regenerated: which prompt is sent when, with real shared content.

What the inference-perf client really does (the README of `ground_truth`, section 3): 100 distinct
prompts in 10 groups that share a system prompt; request k of every stage sends prompt k mod 100 of
one shuffled order; gaps are exponential, rescaled so that a stage's requests fill its duration; the
next stage waits until the last request has come back, and one to three seconds more.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibrate.validation.experiments import Experiment, ReplayLoad, SharedPrefixLoad
from sim.errors import UserError
from sim.request import Segment, prompt_key

IntArray = npt.NDArray[np.int64]

RETOKENISED = 1.047
"""Tokens that reach the server per token asked for: the client joins decoded texts, which come
back as a few more tokens (1.043 to 1.051 over the runs that publish both)."""
LENGTH_SPREAD = 0.27
"""Standard deviation of those lengths over the square root of the mean (0.23 to 0.30 there)."""
PAUSE_S = (1.0, 3.0)
"""Between the last answer of a stage and the start of the next."""


@dataclass(frozen=True)
class StageLoad:
    """What the client wants to send in one stage."""

    pause_ns: int
    """After the stage before has drained."""
    offsets_ns: IntArray
    """When, from the start of the stage; ascending."""
    prompts: IntArray
    """Index of each request's prompt."""
    output_tokens: IntArray


@dataclass(frozen=True)
class Load:
    """A whole run of the client."""

    stages: tuple[StageLoad, ...]
    prompts: tuple[tuple[Segment, ...], ...]
    max_in_flight: int | None
    timeout_ns: int | None

    @property
    def num_requests(self) -> int:
        return sum(len(stage.offsets_ns) for stage in self.stages)


def regenerate(experiment: Experiment, seed: int) -> Load:
    """The experiment's load; `seed` draws what the publication leaves to chance."""
    work = experiment.workload
    if isinstance(work, ReplayLoad):
        return _replay(work.path)
    # Seeds of different experiments are independent; the order of the file does not matter.
    rng = np.random.default_rng([seed, *experiment.id.encode()])
    return _shared_prefix(work, rng)


def _shared_prefix(work: SharedPrefixLoad, rng: np.random.Generator) -> Load:
    count = work.groups * work.prompts_per_group
    lengths = _draw_lengths(work, count, rng)
    prompts = [
        # Content 0..groups-1 are the system prompts, the questions follow.
        (
            Segment(i // work.prompts_per_group, 0, work.system_tokens),
            Segment(work.groups + i, 0, int(lengths[i]) - work.system_tokens),
        )
        for i in range(count)
    ]
    order = rng.permutation(count)
    stages = []
    for number, stage in enumerate(work.stages):
        gaps = rng.exponential(size=stage.num_requests)
        times = np.cumsum(gaps) * (stage.duration_s / gaps.sum())
        stages.append(
            StageLoad(
                pause_ns=round(rng.uniform(*PAUSE_S) * 1e9) if number else 0,
                offsets_ns=np.round(times * 1e9).astype(np.int64),
                prompts=order[np.arange(stage.num_requests) % count].astype(np.int64),
                output_tokens=np.full(stage.num_requests, work.output_tokens, dtype=np.int64),
            )
        )
    timeout_ns = round(work.timeout_s * 1e9) if work.timeout_s else None
    return Load(tuple(stages), tuple(prompts), work.max_in_flight, timeout_ns)


def _draw_lengths(work: SharedPrefixLoad, count: int, rng: np.random.Generator) -> IntArray:
    seen = work.lengths
    mean = seen.mean if seen else RETOKENISED * (work.system_tokens + work.question_tokens)
    lengths = rng.normal(mean, LENGTH_SPREAD * np.sqrt(mean), size=count)
    low = seen.low if seen and seen.low else mean * 0.97
    high = seen.high if seen and seen.high else mean * 1.03
    shortest = work.system_tokens + 1
    return np.maximum(np.clip(np.round(lengths), low, high), shortest).astype(np.int64)


def _replay(path: Path) -> Load:
    """The requests of a CSV file at their times, one stage."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        arrival = np.array([float(row["arrival_ms"]) for row in rows])
        inputs = [int(row["input_tokens"]) for row in rows]
        outputs = np.array([int(row["output_tokens"]) for row in rows], dtype=np.int64)
        hits = [int(row.get("prefix_hit_tokens_ideal") or 0) for row in rows]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: not a list of requests ({error})") from None
    stage = StageLoad(
        pause_ns=0,
        offsets_ns=np.round((arrival - arrival[0]) * 1e6).astype(np.int64),
        prompts=np.arange(len(rows), dtype=np.int64),
        output_tokens=outputs,
    )
    return Load((stage,), tuple(_with_shared_prefixes(inputs, hits)), None, None)


def _with_shared_prefixes(inputs: list[int], hits: list[int]) -> list[tuple[Segment, ...]]:
    """Prompts of the given lengths of which the first `hits` tokens occurred in an earlier one.

    The file does not say in which. A conversation that goes on repeats a whole earlier prompt, so
    the latest one with as many full blocks is taken, else the shortest one that is long enough.
    """
    prompts: list[tuple[Segment, ...]] = []
    for i, (length, hit) in enumerate(zip(inputs, hits, strict=True)):
        own = prompt_key(i)
        if not hit:
            prompts.append((Segment(own, 0, length),))
            continue
        exact = [j for j in range(i) if inputs[j] // 16 * 16 == hit]
        longer = [j for j in range(i) if inputs[j] >= hit]
        if not exact and not longer:
            raise UserError(f"request {i} repeats {hit} tokens that no earlier prompt has")
        donor = exact[-1] if exact else min(longer, key=lambda j: inputs[j])
        shared = _head(prompts[donor], hit)
        rest = length - hit
        prompts.append((*shared, Segment(own, 0, rest)) if rest else shared)
    return prompts


def _head(segments: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    """The first `tokens` tokens of a prompt."""
    found = []
    for segment in segments:
        take = min(tokens, segment.length)
        if take:
            found.append(Segment(segment.content, segment.start, take))
        tokens -= take
    return tuple(found)
