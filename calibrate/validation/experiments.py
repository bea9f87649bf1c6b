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
        except (TypeError, ValueError, AttributeError, UserError) as error:
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
    """The number a field states, or that its remark names; `assumed` when there is none. Raises
    UserError for one that counts nothing."""
    if isinstance(value, bool | int | float):
        try:
            return _count(value, "an engine argument")
        except ValueError as error:
            raise UserError(str(error)) from None
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
    engine = _object(entry["engine"], "engine")
    if engine.get("gpu_memory_utilization") is not None:
        _positive(engine["gpu_memory_utilization"], "engine.gpu_memory_utilization")
    measured = entry.get("measured")
    return Experiment(
        id=str(entry["id"]),
        split=str(entry.get("split", "open")),
        regime=str(entry["regime"]) if entry.get("regime") else None,
        model=_model(entry["model"]),
        gpu=str(entry["gpu"]),
        tp=_count(entry.get("tp") or 1, "tp"),
        pp=_count(entry.get("pp") or 1, "pp"),
        dp=_count(entry.get("dp") or 1, "dp"),
        ep=_expert_ranks(entry),
        engine=engine,
        kv_blocks=stated_int(entry.get("kv_blocks")),
        disaggregated=bool(entry.get("disaggregated", False)),
        workload=_workload(_object(entry["workload"], "workload"), folder),
        measured=measured if isinstance(measured, dict) else None,
        measured_from_queue="no HTTP" in str(engine.get("driver", "")),
    )


def _model(fields: Any) -> Json:
    model = _object(fields, "model")
    if not isinstance(model["hf"], str) or not model["hf"]:
        raise ValueError(f"model.hf must be a name, not {model['hf']!r}")
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
        if model.get(name) is not None:
            _count(model[name], f"model.{name}")
    moe = model.get("moe")
    if moe:
        for name in ("experts", "topk", "expert_intermediate"):
            _count(_object(moe, "model.moe")[name], f"model.moe.{name}")
    return model


def _expert_ranks(entry: Json) -> int | None:
    """A number (`4 (a remark)` too), or the rule `tp*dp` that some entries quote."""
    stated = entry.get("ep")
    if isinstance(stated, str):
        if stated.startswith("tp*dp"):
            return _count(entry.get("tp") or 1, "tp") * _count(entry.get("dp") or 1, "dp")
        number = re.match(r"\d+", stated)
        return int(number.group()) if number else None
    return None if stated is None else _count(stated, "ep")


def _workload(work: Json, folder: Path) -> SharedPrefixLoad | ReplayLoad:
    kind = str(work["kind"])
    if kind == "trace":
        return ReplayLoad(folder / str(work["file"]))
    if "shared_prefix" not in kind:
        raise ValueError(f"workload kind {kind!r} is not known (shared_prefix, trace)")
    prompts = _object(work["prompts"], "workload.prompts")
    client = _object(work.get("client") or {}, "workload.client")
    output = _object(work["output"], "workload.output")
    at_once = re.search(r"at most (\d+) requests in flight", str(work.get("arrival", "")))
    stages = work["stages"]
    if not isinstance(stages, list) or not stages:
        raise ValueError("workload.stages must be a list of stages")
    timeout_s = client.get("timeout_s")
    return SharedPrefixLoad(
        stages=tuple(_stage(_object(s, "workload.stages")) for s in stages),
        groups=_count(prompts["groups"], "prompts.groups"),
        prompts_per_group=_count(prompts["prompts_per_group"], "prompts.prompts_per_group"),
        system_tokens=_count(prompts["system_prompt_tokens"], "prompts.system_prompt_tokens"),
        question_tokens=_count(prompts["question_tokens"], "prompts.question_tokens"),
        lengths=_lengths(prompts.get("observed_prompt_len")),
        output_tokens=_count(output["tokens_per_request"], "output.tokens_per_request"),
        timeout_s=None if timeout_s is None else _positive(timeout_s, "client.timeout_s"),
        max_in_flight=_count(int(at_once.group(1)), "requests in flight") if at_once else None,
    )


def _stage(stage: Json) -> Stage:
    return Stage(
        _positive(stage["rate_rps"], "rate_rps"),
        _positive(stage["duration_s"], "duration_s"),
        _count(stage["num_requests"], "num_requests"),
    )


def _lengths(observed: Any) -> PromptLengths | None:
    name = "prompts.observed_prompt_len"
    if isinstance(observed, int | float):
        return PromptLengths(_positive(observed, name))
    if isinstance(observed, dict):
        mean, low, high = (observed.get(k) for k in ("mean", "min", "max"))
        return PromptLengths(
            _positive(mean, name),
            None if low is None else _positive(low, name),
            None if high is None else _positive(high, name),
        )
    return None  # a remark: not published


MOST = 10_000_000
"""No count, duration or length of a deployment is larger."""


def _object(value: Any, name: str) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {value!r}")
    return value


def _count(value: Any, name: str) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 1 <= value <= MOST:
        raise ValueError(f"{name} must be a whole number from 1 to {MOST}, not {value!r}")
    return int(value)


def _positive(value: Any, name: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MOST:
        raise ValueError(f"{name} must be a number above 0 and up to {MOST}, not {value!r}")
    return float(value)
