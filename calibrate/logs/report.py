"""What a fit found, as text for people and as a document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from calibrate.logs.errors import Error, Errors
from calibrate.logs.fit import Fitted
from calibrate.logs.parameters import Parameter
from calibrate.logs.records import Records, Requests
from sim.cost.profile import Profile
from sim.system import System

AT_BOUND = 0.999
GREW = 1.1
"""Held-out errors that grow by this factor are told; less is the scatter of single records."""
PARTS = ("fitted", "held out")


def document(
    logs: Sequence[Records], system: System, base: Profile, fitted: Fitted, out: str
) -> dict[str, Any]:
    """Everything, in plain values; errors in per cent, latencies' and steps' alike."""
    return {
        "logs": [_log(log) for log in logs],
        "server": _server(system, base),
        "fit": {
            "fitted": fitted.num_fitted,
            "held_out": fitted.num_held_out,
            "simulations": fitted.simulations,
            "evaluations": fitted.solution.evaluations,
            "converged": fitted.solution.converged,
        },
        "parameters": [_parameter(fitted, i) for i in range(len(fitted.parameters))],
        "errors": {
            when: {
                name: {part.replace(" ", "_"): asdict(e) for part, e in parts.items()}
                for name, parts in table.items()
            }
            for when, table in (("before", fitted.before), ("after", fitted.after))
        },
        "remarks": remarks(fitted),
        "profile": out,
    }


def _log(log: Records) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": log.name,
        "format": log.format,
        "records": len(log),
        "counts": log.counts,
        "notes": list(log.notes),
    }
    if isinstance(log, Requests):
        described["max_in_flight"] = log.max_in_flight
    return described


def _server(system: System, base: Profile) -> dict[str, Any]:
    settings = system.scenario.cost
    return {
        "model": system.model.name,
        "gpu": system.gpu.name,
        "engine_version": settings.engine_version,
        "frontend": settings.frontend,
        "base_profile": base.label,
    }


def _parameter(fitted: Fitted, i: int) -> dict[str, Any]:
    p, solution = fitted.parameters[i], fitted.solution
    return {
        "name": p.name,
        "unit": p.unit,
        "before": p.base,
        "after": _value(fitted, p),
        "fitted": bool(solution.fitted[i]),
        "spread": float(solution.spread[i]),
        "remark": solution.why_not[i] or ("at its bound" if _at_bound(fitted, i) else ""),
    }


def _value(fitted: Fitted, p: Parameter) -> float:
    named: dict[str, float] = getattr(fitted.fit, p.group)
    return named.get(p.field, p.base)


def _at_bound(fitted: Fitted, i: int) -> bool:
    return abs(float(fitted.solution.theta[i])) >= AT_BOUND * math.log(fitted.parameters[i].most)


def remarks(fitted: Fitted) -> list[str]:
    """What a reader of the errors must know."""
    found = []
    for i, p in enumerate(fitted.parameters):
        if _at_bound(fitted, i):
            found.append(
                f"{p.name} is at its bound: model, GPU or engine settings may not be the server's"
            )
    if not fitted.solution.converged:
        found.append("the fit has not converged: treat the numbers with care")
    if not fitted.solution.fitted.any():
        found.append("the records determine no parameter: the profile is as before")
    worse = [
        name
        for name, parts in fitted.after.items()
        if "held out" in parts
        and parts["held out"].median > GREW * fitted.before[name]["held out"].median
    ]
    if worse:
        found.append(f"median errors on what was held out grew: {', '.join(worse)}")
    return found


def text(logs: Sequence[Records], system: System, base: Profile, fitted: Fitted, out: str) -> str:
    """The document as a page of 100 columns."""
    return "\n".join(_lines(logs, system, base, fitted, out))


def _lines(
    logs: Sequence[Records], system: System, base: Profile, fitted: Fitted, out: str
) -> Iterator[str]:
    for log in logs:
        kind = "requests" if isinstance(log, Requests) else "steps"
        counts = ", ".join(f"{n:,} {name}" for name, n in log.counts.items() if n)
        loop = ""
        if isinstance(log, Requests):
            slots = log.max_in_flight
            loop = "; open loop" if slots is None else f"; closed loop of {slots}"
        yield f"log         {log.name}: {log.format}, {len(log):,} {kind} ({counts}){loop}"
        for note in log.notes:
            yield f"            {note}"
    about = _server(system, base)
    yield (
        f"server      {about['model']} on {about['gpu']}, vLLM {about['engine_version']}, frontend "
        f"{about['frontend']}; base profile {about['base_profile']}"
    )
    effort = f", {fitted.simulations} simulations" if fitted.simulations else ""
    yield (f"records     {fitted.num_fitted:,} fitted, {fitted.num_held_out:,} held out{effort}")
    yield ""
    yield f"{'parameter':<22}{'before':>10}{'after':>10}"
    for i, p in enumerate(fitted.parameters):
        row = _parameter(fitted, i)
        unit = f" {p.unit}" if p.unit else ""
        line = f"{p.name:<22}{p.base:>10.4g}{row['after']:>10.4g}{unit:<4}"
        if row["fitted"]:
            line += f"+- {100 * row['spread']:.1f} %"
        if row["remark"]:
            line += f"  {row['remark']}" if row["fitted"] else f"kept: {row['remark']}"
        yield line.rstrip()
    yield ""
    yield f"{'':<16}{'fitted':^42}{'held out':^42}".rstrip()
    cells = "".join(f"{name:>14}" for name in ("mean", "median", "p90"))
    yield f"{'error, %':<16}{cells}{cells}"
    for name in fitted.before:
        line = f"{name:<16}"
        for part in PARTS:
            for field in ("bias", "median", "p90"):
                line += f"{_change(fitted, name, part, field):>14}"
        yield line.rstrip()
    yield "mean: of the means, signed; median and p90: of single records; before > after"
    if fitted_remarks := remarks(fitted):
        yield ""
        yield from (f"note: {remark}" for remark in fitted_remarks)
    yield f"profile     {out}"


def _change(fitted: Fitted, name: str, part: str, field: str) -> str:
    before = _field(fitted.before, name, part, field)
    after = _field(fitted.after, name, part, field)
    sign = "+" if field == "bias" else ""
    return "-" if before is None or after is None else f"{before:{sign}.1f} > {after:{sign}.1f}"


def _field(table: Errors, name: str, part: str, field: str) -> float | None:
    found: Error | None = table.get(name, {}).get(part)
    return None if found is None else float(getattr(found, field))
