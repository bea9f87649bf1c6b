"""What is simulated: one tree of plain values, from YAML, flags, `--set path=value` or Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from sim.engine.config import EngineConfig
from sim.errors import UserError, unknown
from sim.fields import build, coerce, options_of
from sim.tree import DEFAULT_POLICIES, read_yaml, set_path


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def _positive(name: str, value: float | None) -> None:
    _need(value is None or 0 < value < float("inf"), f"{name} must be positive, got {value!r}")


@dataclass(frozen=True)
class PolicyChoice:
    """A policy by name (or `module:Class`, `path/to/file.py:Class`) and its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceSource:
    """A trace file, and which part of it is used."""

    path: str
    """The file, plain or gzip; a relative path in a scenario file is relative to that file."""
    format: str | None = None
    """Name of the format; None: detected."""
    columns: dict[str, str] | None = None
    """Which column is what, for files of no known format: `{arrival: ts, prompt: in_tok, ...}`."""
    skip_bad_rows: bool = False
    """Count rows that cannot be read, instead of stopping at the first."""
    arrivals: str | None = None
    """Arrival process (`poisson:rate=8`) for a file without arrivals, or instead of its own."""


@dataclass(frozen=True)
class CostSettings:
    """How the time of a step is found."""

    profile: str | None = None
    """A profile file made by `calibrate`, or the GPU whose shipped profile it is; None: the GPU's
    own, or its nearest relative's."""
    engine_version: str = "0.33.0"
    """vLLM version whose host work is modelled."""
    frontend: str = "http"
    """What lies between client and engine: http, network, in-process or none."""
    host_zero: bool = False
    """Leave out all host time (for closed-form checks)."""


@dataclass(frozen=True)
class ExecuteSettings:
    """The real engine in the place of the cost model (`simulate --execute`)."""

    device: str | None = None
    """cpu, cuda, cuda:N, or auto (the GPU if there is one); None: steps are modelled."""
    dtype: str = "bf16"
    """Of the weights: bf16, fp16 or fp32."""
    draft_model: str | None = None
    """For `engine.spec_method: draft_model`: a built-in name or a model folder."""
    wall_clock: bool = False
    """Serve in real time, not on a virtual clock of measured durations."""

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp16", "fp32"):
            raise unknown("dtype", self.dtype, ("bf16", "fp16", "fp32"))
        for name in ("wall_clock", "draft_model"):
            if getattr(self, name) and self.device is None:
                raise UserError(f"execute.{name} is for the real engine: set execute.device too")


@dataclass(frozen=True)
class ClusterSettings:
    replicas: int = 1
    """Replicas behind the router."""

    def __post_init__(self) -> None:
        _need(
            1 <= self.replicas <= 100_000,
            f"cluster.replicas must be at least 1 and at most 100000, got {self.replicas}",
        )


@dataclass(frozen=True)
class ClientSettings:
    timeout_s: float | None = None
    """A client gives up (and its request is aborted) this long after sending; None: never."""

    def __post_init__(self) -> None:
        _positive("client.timeout_s", self.timeout_s)


@dataclass(frozen=True)
class SLO:
    """What a request must meet, seconds; None: no limit. `tpot_s` holds for requests with more
    than one output token."""

    ttft_s: float | None = None
    """Most seconds to the first token."""
    tpot_s: float | None = None
    """Most seconds per output token after it."""
    e2e_s: float | None = None
    """Most seconds to the last token."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _positive(f"slo.{f.name}", getattr(self, f.name))

    def given(self) -> bool:
        return any(getattr(self, f.name) is not None for f in dataclasses.fields(self))


@dataclass(frozen=True)
class Scenario:
    """A complete description of one simulation: the same scenario gives the same result.

    Built by `Scenario.of(...)` or `Scenario.load(path)`; `with_` changes single fields by path.
    """

    model: str = "Llama-3-8B"
    """A built-in name, or a Hugging Face config.json."""
    gpu: str = "A100-80G"
    """A built-in name."""
    cost: CostSettings = CostSettings()
    execute: ExecuteSettings = ExecuteSettings()
    policy: PolicyChoice = PolicyChoice(DEFAULT_POLICIES["policy"])
    """Scheduling policy: who runs in the next step; its options are fields below it."""
    eviction: PolicyChoice = PolicyChoice(DEFAULT_POLICIES["eviction"])
    """Eviction policy: which cached KV block goes first."""
    admission: PolicyChoice = PolicyChoice(DEFAULT_POLICIES["admission"])
    """Admission policy: which requests may enter."""
    routing: PolicyChoice = PolicyChoice(DEFAULT_POLICIES["routing"])
    """Routing policy: which replica serves a request."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig; what is left out has vLLM's default for the GPU."""
    cluster: ClusterSettings = ClusterSettings()
    trace: TraceSource | None = None
    generate: str | dict[str, Any] | None = None
    """A synthetic trace instead of a file: a workload as `traces.generate` takes it."""
    limit: int | None = None
    """Only the first so many requests."""
    start_s: float | None = None
    """Only requests from here on; see `end_s`."""
    end_s: float | None = None
    """Only requests that arrive in [start, end), seconds on the trace's own clock from its first
    arrival, before scaling."""
    rate_scale: float = 1.0
    """Requests come this many times faster."""
    client: ClientSettings = ClientSettings()
    slo: SLO = SLO()
    warm_up_s: float = 0.0
    """Requests that arrive earlier than this are served but not measured."""
    horizon_s: float | None = None
    """The simulation stops here, whatever is still inside; None: when all is done."""
    capacity_probe: bool = True
    """Measure the capacity with a short saturated run of the same requests."""
    seed: int = 0
    """Seed of everything random: workload, arrivals, policies, accepted drafts."""
    fast_forward: bool = True
    """Merge steps where nothing can change (proven equal); False walks every step."""

    def __post_init__(self) -> None:
        kinds = dict.fromkeys(DEFAULT_POLICIES, PolicyChoice) | _SECTIONS
        for name, kind in kinds.items():
            value = getattr(self, name)
            _need(
                isinstance(value, kind),
                f"{name} is a {kind.__name__}, not {value!r}; Scenario.of() takes plain values",
            )
        _need(self.trace is None or self.generate is None, "give a trace or generate, not both")
        _need(self.limit is None or self.limit >= 1, f"limit must be at least 1, got {self.limit}")
        _positive("rate_scale", self.rate_scale)
        _positive("horizon_s", self.horizon_s)
        _need(
            0 <= self.warm_up_s < 1e9,
            f"warm_up_s must be at least 0 and below 1e9 (seconds), got {self.warm_up_s}",
        )
        _need(self.seed >= 0, f"seed must not be negative, got {self.seed}")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """From keyword arguments in the form of the YAML file: policies by name or as
        `{name: ..., option: ...}`, the trace by path or as `{path: ..., ...}`."""
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From the plain tree that `to_dict` gives. UserError for what is unknown or wrong."""
        given = dict(values)
        for name in given:
            if name not in options_of(cls):
                raise unknown("scenario field", str(name), options_of(cls))
        for name in DEFAULT_POLICIES:
            if name in given:
                given[name] = _choice(given[name], name)
        if given.get("trace") is not None:
            given["trace"] = _section(TraceSource, given["trace"], "trace", short="path")
        for name, section in _SECTIONS.items():
            if name in given:
                given[name] = _section(section, given[name], name)
        if "engine" in given:
            given["engine"] = _engine(given["engine"])
        types = options_of(cls)
        for name, value in given.items():
            if name != "engine" and not dataclasses.is_dataclass(value):
                given[name] = coerce(value, types[name], name)
        return cls(**given)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a YAML file, such as the `scenario.yaml` that `--out` writes."""
        return cls.from_dict(read_yaml(path))

    def to_dict(self) -> dict[str, Any]:
        """The plain tree, every field in it; `from_dict` reads it back."""
        tree: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, PolicyChoice):
                tree[f.name] = {"name": value.name, **value.options}
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                tree[f.name] = dataclasses.asdict(value)
            elif isinstance(value, Mapping):
                tree[f.name] = {k: _plain(v) for k, v in value.items()}
            else:
                tree[f.name] = value
        return tree

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def with_(self, changes: Mapping[str, Any]) -> Self:
        """A copy with fields changed by dotted path: `{"engine.max_num_seqs": 64}`."""
        tree = self.to_dict()
        for path, value in changes.items():
            set_path(tree, path, value)
        return self.from_dict(tree)


_SECTIONS: dict[str, type] = {
    "cost": CostSettings,
    "execute": ExecuteSettings,
    "cluster": ClusterSettings,
    "client": ClientSettings,
    "slo": SLO,
}


def _choice(value: Any, where: str) -> PolicyChoice:
    if isinstance(value, PolicyChoice):
        return value
    if isinstance(value, str):
        return PolicyChoice(value)
    if isinstance(value, Mapping):
        options = {str(k): v for k, v in value.items()}
        name = options.pop("name", DEFAULT_POLICIES[where])
        return PolicyChoice(coerce(name, str, f"{where}.name"), options)
    raise UserError(f"{where} must be a policy's name or a mapping with its name, got {value!r}")


def _section(cls: type[Any], value: Any, where: str, short: str | None = None) -> Any:
    if isinstance(value, cls):
        return value
    if short is not None and isinstance(value, str | Path):
        value = {short: str(value)}
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where} must be a mapping of its fields, got {value!r}")
    return build(cls, value, where)


def _engine(value: Any) -> dict[str, Any]:
    """Engine settings with the types of EngineConfig; None means vLLM's default."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"engine must be a mapping of its fields, got {value!r}")
    types = options_of(EngineConfig)
    for name in value:
        if name == "policy":
            raise UserError("engine.policy: name the scheduling policy with --policy instead")
        if name not in types:
            raise unknown("field of engine", str(name), types)
    return {name: coerce(v, types[name] | None, f"engine.{name}") for name, v in value.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
