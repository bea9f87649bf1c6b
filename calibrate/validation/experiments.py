"""Published deployments, read from a file in the layout of `ground_truth/experiments_open.json`.

An entry says which model ran where, with which engine arguments, under which load; entries of the
open split carry what was measured. Fields that the publication leaves open hold a remark instead of
a value (`"not stated (2048 in fig 6/7 logs)"`): a number named in the remark is used, else None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import UserError

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """One stage of a load: `num_requests` arrivals within `duration_s`."""

    rate_rps: float
    duration_s: float
    num_requests: int


@dataclass(frozen=True)
class PromptLengths:
    """Lengths of the distinct prompts as the server counted them, tokens."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class SharedPrefixLoad:
    """inference-perf's shared-prefix client: few distinct prompts, sent over and over."""

    stages: tuple[Stage, ...]
    groups: int
    prompts_per_group: int
    system_tokens: int
    question_tokens: int
    lengths: PromptLengths | None
    output_tokens: int
    timeout_s: float | None
    max_in_flight: int | None
    """Requests that the client keeps open at most: above it the stage is a closed loop."""


@dataclass(frozen=True)
class ReplayLoad:
    """Requests to replay: CSV `arrival_ms, input_tokens, output_tokens, prefix_hit_...`."""

    path: Path
    output_tokens_exact: bool = True


@dataclass(frozen=True)
class Experiment:
    """One deployment under one load."""

    id: str
    split: str
    regime: str | None
    model: Json
    gpu: str
    tp: int
    pp: int
    dp: int
    ep: int | None
    """GPUs that share the experts, where stated; None: not stated or not applicable."""
    engine: Json
    kv_blocks: int | None
    """As vLLM logs it: the null block included."""
    disaggregated: bool
    workload: SharedPrefixLoad | ReplayLoad
    measured: Json | None
    measured_from_queue: bool
    """TTFT and E2E count from the engine's queue, not from the client's sending."""

    @property
    def family(self) -> str:
        return self.id.partition("-")[0]

    @property
    def version(self) -> str | None:
        """The engine's version, or the first one its remark names."""
        found = re.search(r"\d+\.\d+\.\d+", str(self.engine.get("version", "")))
        return found.group() if found else None


def load_experiments(path: Path) -> list[Experiment]:
    """All experiments of the file, in its order. Raises UserError for what cannot be read."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    entries = tree.get("experiments") if isinstance(tree, dict) else tree
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path}: no list of experiments in it")
    found = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise UserError(f"{path}: experiment number {number} is not an object")
        name = entry.get("id", f"number {number}")
        try:
            found.append(_experiment(entry, path.parent))
        except KeyError as error:
            raise UserError(f"{path}: experiment {name}: field {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path}: experiment {name}: {error}") from None
    return found


def select(
    experiments: Sequence[Experiment], pattern: str | None, limit: int | None
) -> list[Experiment]:
    """Those whose id matches the regular expression `pattern`, the first `limit` of them."""
    try:
        wanted = re.compile(pattern or "")
    except re.error as error:
        raise UserError(f"--only {pattern!r} is not a regular expression ({error})") from None
    chosen = [e for e in experiments if wanted.search(e.id)]
    if not chosen:
        raise UserError(f"--only {pattern!r} matches none of the {len(experiments)} experiments")
    return chosen[:limit]


def stated_int(value: Any, assumed: int | None = None) -> int | None:
    """The number a field states, or that its remark names; `assumed` when there is none."""
    if isinstance(value, bool):
        raise ValueError(f"a number is expected, not {value!r}")
    if isinstance(value, int | float):
        return int(value)
    if isinstance(value, str):
        number = re.search(r"\((\d+)\b", value) or re.fullmatch(r"\s*(\d+)\b.*", value)
        if number:
            return int(number.group(1))
    return assumed


def stated_bool(value: Any, assumed: bool) -> bool:
    """As `stated_int`, for fields such as `not stated (True in every raw log)`."""
    if isinstance(value, bool):
        return value
    named = re.search(r"\b(true|false)\b", str(value).lower())
    return named.group() == "true" if named else assumed


def _experiment(entry: Json, folder: Path) -> Experiment:
    engine = entry["engine"]
    measured = entry.get("measured")
    return Experiment(
        id=str(entry["id"]),
        split=str(entry.get("split", "open")),
        regime=entry.get("regime"),
        model=entry["model"],
        gpu=str(entry["gpu"]),
        tp=int(entry.get("tp") or 1),
        pp=int(entry.get("pp") or 1),
        dp=int(entry.get("dp") or 1),
        ep=_expert_ranks(entry),
        engine=engine,
        kv_blocks=stated_int(entry.get("kv_blocks")),
        disaggregated=bool(entry.get("disaggregated", False)),
        workload=_workload(entry["workload"], folder),
        measured=measured if isinstance(measured, dict) else None,
        measured_from_queue="no HTTP" in str(engine.get("driver", "")),
    )


def _expert_ranks(entry: Json) -> int | None:
    """A number (`4 (a remark)` too), or the rule `tp*dp` that some entries quote."""
    stated = entry.get("ep")
    if isinstance(stated, str):
        if stated.startswith("tp*dp"):
            return int(entry.get("tp") or 1) * int(entry.get("dp") or 1)
        number = re.match(r"\d+", stated)
        return int(number.group()) if number else None
    return stated


def _workload(work: Json, folder: Path) -> SharedPrefixLoad | ReplayLoad:
    kind = work["kind"]
    if kind == "trace":
        return ReplayLoad(folder / work["file"])
    if "shared_prefix" not in kind:
        raise ValueError(f"workload kind {kind!r} is not known (shared_prefix, trace)")
    prompts, client = work["prompts"], work.get("client") or {}
    at_once = re.search(r"at most (\d+) requests in flight", str(work.get("arrival", "")))
    return SharedPrefixLoad(
        stages=tuple(
            Stage(float(s["rate_rps"]), float(s["duration_s"]), int(s["num_requests"]))
            for s in work["stages"]
        ),
        groups=int(prompts["groups"]),
        prompts_per_group=int(prompts["prompts_per_group"]),
        system_tokens=int(prompts["system_prompt_tokens"]),
        question_tokens=int(prompts["question_tokens"]),
        lengths=_lengths(prompts.get("observed_prompt_len")),
        output_tokens=int(work["output"]["tokens_per_request"]),
        timeout_s=client.get("timeout_s"),
        max_in_flight=int(at_once.group(1)) if at_once else None,
    )


def _lengths(observed: Any) -> PromptLengths | None:
    if isinstance(observed, int | float):
        return PromptLengths(float(observed))
    if isinstance(observed, dict):
        return PromptLengths(float(observed["mean"]), observed.get("min"), observed.get("max"))
    return None  # a remark: not published
