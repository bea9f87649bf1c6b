"""`generate`: synthetic traces, drawn in columns from a description of the workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sim.errors import UserError, unknown
from sim.request import Trace

from . import spec
from .arrivals import MAX_REQUESTS, PROCESSES, ArrivalProcess
from .lengths import Drawn, EmpiricalPairs, Lengths
from .readers import load_lengths
from .segments import SegmentTable, from_prefixes
from .spec import Call
from .values import MAX_TOKENS, shown

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SystemPrompts:
    """`prompts` system prompts that requests share, in front of their own prompt.

    Prompt `k` (from 1) is used in proportion to `k**-zipf`: 0 is all alike. A part `share` of the
    requests has one at all.
    """

    prompts: int
    length: Lengths
    zipf: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.prompts <= 10_000_000:
            raise UserError(f"system: the number of prompts must be 1 to 1e7, not {self.prompts}")
        if not 0 <= self.zipf <= 10:
            raise UserError(f"system: zipf must be between 0 and 10, not {self.zipf:g}")
        if not 0 < self.share <= 1:
            raise UserError(f"system: share must be above 0 and at most 1, not {self.share:g}")


@dataclass(frozen=True)
class Workload:
    """What `generate` draws: `n` requests, or all before `duration_s`.

    `lengths` is a pair (prompt, output) of distributions, or pairs observed together. `tenants`
    and `priorities` map each name or number to its share (any positive weights).
    """

    arrivals: ArrivalProcess
    lengths: tuple[Lengths, Lengths] | EmpiricalPairs
    n: int | None = None
    duration_s: float | None = None
    system: SystemPrompts | None = None
    tenants: Mapping[str, float] = field(default_factory=dict)
    priorities: Mapping[int, float] = field(default_factory=dict)
    name: str = "workload"

    def __post_init__(self) -> None:
        if (self.n is None) == (self.duration_s is None):
            raise UserError(f"{self.name}: give either n=REQUESTS or duration_s=SECONDS")
        if self.n is not None and not 1 <= self.n <= MAX_REQUESTS:
            raise UserError(f"{self.name}: n must be 1 to {MAX_REQUESTS}, not {self.n}")
        if self.duration_s is not None and not 0 < self.duration_s <= 4e9:
            raise UserError(
                f"{self.name}: duration_s must be above 0 and at most 4e9, not {self.duration_s:g}"
            )


def generate(
    workload: str | Mapping[str, object] | Workload, seed: int | np.random.Generator
) -> Trace:
    """Draw a trace; the same seed gives the same trace.

    `workload` is a text such as `poisson:rate=8,n=1000,prompt=lognormal(1020,2735),output=128`
    (see traces/README.md), the same as a mapping, or a Workload. Arrivals, lengths, system prompts,
    tenants and priorities have random streams of their own: changing one leaves the others alone.
    Raises UserError when the description is wrong.
    """
    if not isinstance(workload, Workload):
        workload = parse(workload)
    if not isinstance(seed, np.random.Generator) and seed < 0:
        raise UserError(f"seed must be 0 or more, not {seed}")
    streams = np.random.default_rng(seed).spawn(7)
    if workload.n is not None:
        arrival_ns = workload.arrivals.first(workload.n, streams[0])
    else:
        arrival_ns = workload.arrivals.within(workload.duration_s or 0.0, streams[0])
    n = len(arrival_ns)
    if not n:
        raise UserError(f"{workload.name}: no request arrives in {workload.duration_s:g} s")
    if isinstance(workload.lengths, EmpiricalPairs):
        prompt, output = workload.lengths.draw(n, streams[1])
    else:
        prompt = workload.lengths[0].draw(n, streams[1])
        output = workload.lengths[1].draw(n, streams[2])
    counts = {"requests_generated": n}
    segments = None
    if workload.system is not None:
        prompt, segments = _with_system(workload.system, prompt, streams[3], streams[4])
    if prompt.clipped or output.clipped:
        counts |= {"prompts_clipped": prompt.clipped, "outputs_clipped": output.clipped}
    tenants = _mixed(workload.tenants, n, streams[5])
    priorities = _mixed(workload.priorities, n, streams[6])
    return Trace(
        name=workload.name,
        format="generated",
        arrival_ns=arrival_ns,
        prompt_tokens=prompt.tokens,
        output_tokens=output.tokens,
        segments=segments,
        tenant=None if tenants is None else tenants.tolist(),
        priority=None if priorities is None else priorities.astype(np.int64),
        counts=counts,
    )


def _with_system(
    system: SystemPrompts, own: Drawn, rng: np.random.Generator, rng_lengths: np.random.Generator
) -> tuple[Drawn, SegmentTable]:
    n = len(own.tokens)
    texts = system.length.draw(system.prompts, rng_lengths)
    cumulated = np.cumsum(np.arange(1, system.prompts + 1, dtype=np.float64) ** -system.zipf)
    which, with_one = rng.random((2, n))
    content = np.searchsorted(cumulated, which * cumulated[-1], side="right").astype(np.int64)
    content = np.minimum(content, system.prompts - 1)
    length = np.where(with_one < system.share, texts.tokens[content], 0)
    total = own.tokens + length
    if int(total.max()) > MAX_TOKENS:
        raise UserError(f"system: a prompt would have {total.max()} tokens, above {MAX_TOKENS}")
    return Drawn(total, own.clipped), from_prefixes(total, content, length)


def _mixed(
    shares: Mapping[str, float] | Mapping[int, float], n: int, rng: np.random.Generator
) -> npt.NDArray[np.object_] | None:
    if not shares:
        return None
    cumulated = np.cumsum(list(shares.values()))
    index = np.searchsorted(cumulated, rng.random(n) * cumulated[-1], side="right")
    names = np.fromiter(shares, dtype=object, count=len(shares))
    result: npt.NDArray[np.object_] = names[np.minimum(index, len(names) - 1)]
    return result


_KEYS = ("n", "duration_s", "prompt", "output", "lengths", "system", "tenants", "priorities")


def parse(description: str | Mapping[str, object]) -> Workload:
    """The Workload of a text or mapping; reads the traces it names. Raises UserError."""
    if isinstance(description, str):
        options = spec.parse_workload(description)
        name = description if description.isprintable() else shown(description, 300)
    else:
        options = dict(description)
        name = "workload"
    if "arrivals" not in options:
        raise UserError(f"{name}: needs arrivals: one of {', '.join(sorted(PROCESSES))}")
    process = {key: value for key, value in options.items() if key not in _KEYS}
    for key in process:
        if key not in ("arrivals", "rate", "cv"):
            raise unknown("workload option", key, (*_KEYS, "arrivals", "rate", "cv"))
    return Workload(
        arrivals=spec.arrival_process(process),
        lengths=_lengths(options, name),
        n=spec.count(options["n"], "n") if "n" in options else None,
        duration_s=spec.number(options["duration_s"], "duration_s")
        if "duration_s" in options
        else None,
        system=_system(options["system"]) if "system" in options else None,
        tenants=_shares(options["tenants"], "tenants") if "tenants" in options else {},
        priorities={
            spec.count(key, "priorities"): share
            for key, share in _shares(options["priorities"], "priorities").items()
        }
        if "priorities" in options
        else {},
        name=name,
    )


def _lengths(options: Mapping[str, object], name: str) -> tuple[Lengths, Lengths] | EmpiricalPairs:
    if "lengths" in options:
        if "prompt" in options or "output" in options:
            raise UserError(f"{name}: lengths stands for prompt and output; give one or the other")
        item = spec.call(options["lengths"], "lengths")
        if item.name != "empirical":
            raise unknown("joint length distribution", item.name, ["empirical"])
        trace = _observed(spec.file_of(item, "lengths"), item)
        return EmpiricalPairs(trace.prompt_tokens, trace.output_tokens)
    for key in ("prompt", "output"):
        if key not in options:
            raise UserError(f"{name}: needs {key}=LENGTHS, such as {key}=lognormal(1020,2735)")
    return (
        spec.length(options["prompt"], "prompt", lambda f, c: _observed(f, c).prompt_tokens),
        spec.length(options["output"], "output", lambda f, c: _observed(f, c).output_tokens),
    )


def _observed(file: str, item: Call) -> Trace:
    columns = spec.bind(item, ("file", "columns"), "empirical").get("columns")
    return load_lengths(file, columns=None if columns is None else columns.name)


def _system(value: object) -> SystemPrompts:
    """`4x512`, `4xuniform(200,900)` or `prompts(4,512,zipf=1,share=0.8)`."""
    item = spec.call(value, "system")
    digits, times, rest = item.name.partition("x")
    if times and digits.isdigit() and not item.quoted:
        inner = Call(rest, item.args, item.named)
        return SystemPrompts(spec.count(Call(digits), "system"), _system_length(inner))
    if item.name != "prompts":
        example = "system=4x512 or system=prompts(4,512,zipf=1)"
        raise UserError(f"system: {item.name!r} is not understood; write {example}")
    given = spec.bind(item, ("prompts", "length", "zipf", "share"), "system")
    if "prompts" not in given or "length" not in given:
        raise UserError("system: prompts needs a number and a length, as in prompts(4,512)")
    options = {
        key: spec.number(given[key], f"system: {key}") for key in ("zipf", "share") if key in given
    }
    number = spec.count(given["prompts"], "system: prompts")
    return SystemPrompts(number, _system_length(given["length"]), **options)


def _system_length(item: Call) -> Lengths:
    return spec.length(item, "system", lambda f, c: _observed(f, c).prompt_tokens)


def _shares(value: object, what: str) -> dict[str, float]:
    """`mix(gold=0.2,free=0.8)`, or the mapping {gold: 0.2, free: 0.8}."""
    if isinstance(value, Mapping):
        items = {str(key): share for key, share in value.items()}
    else:
        item = spec.call(value, what)
        if item.name != "mix" or item.args or not item.named:
            raise UserError(f"{what}: write mix(NAME=SHARE,...), as in {what}=mix(a=0.2,b=0.8)")
        items = dict(item.named)
    shares = {key: spec.number(share, f"{what}: {key}") for key, share in items.items()}
    if not shares or min(shares.values()) < 0 or not 0 < sum(shares.values()) < 1e300:
        raise UserError(f"{what}: shares must be 0 or more, and some above 0")
    return shares
