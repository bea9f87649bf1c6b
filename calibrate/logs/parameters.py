"""What may be fitted: a scale per operator class of the model, and constants of host and server.

All are positive and are fitted as the logarithm of a factor on what the profile has, which is also
where the prior is: a parameter that the logs say nothing about stays there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from calibrate.logs.records import FloatArray
from sim.cost.host import host_model, overlaps
from sim.cost.profile import Entry, Profile
from sim.cost.server import OP, ServerFit, server_fit
from sim.errors import unknown
from sim.system import System

SCALE_SPREAD = 0.3
"""Spread of the prior of a scale, of the logarithm: kernels of one GPU differ by so much between
engine versions at the most (attention; products 5 %)."""
HOST_SPREAD = 0.7
"""Of a constant: another CPU, another HTTP stack."""
MOST = 4.0
"""Bounds: a scale, or a constant of the host, may change by this factor. More is another GPU,
another model or another configuration than the one that served."""
MOST_HOST = 20.0


@dataclass(frozen=True)
class Parameter:
    """One number that may be fitted."""

    name: str
    group: str
    """scales, host or frontend: the field of `ServerFit` that holds it."""
    field: str
    base: float
    """What the profile has."""
    spread: float
    """Of the prior, of the logarithm of the factor."""
    most: float
    """Largest factor; the smallest is one over it."""
    step: float
    """Of the factor's logarithm, over which derivatives are taken."""

    @property
    def unit(self) -> str:
        return "" if self.group == "scales" else "us"


def parameters(system: System, profile: Profile, *, client: bool) -> list[Parameter]:
    """What can be fitted for this server. `client`: also what lies between client and engine, as
    only the latencies of requests tell."""
    given, config = server_fit(profile), system.config
    settings = system.scenario.cost
    names = ["attention", "linear"]
    if system.model.moe is not None:
        names.append("moe")
    if config.world_size * config.data_parallel_size > 1:
        names.append("communication")
    found = [
        Parameter(f"{n} scale", "scales", n, given.scale(n), SCALE_SPREAD, MOST, 0.12)
        for n in names
    ]
    if settings.host_zero:
        return found
    kind = "async" if overlaps(config) else "sync"
    hosts = [f"{kind}_us", f"{kind}_per_seq_us"]
    if config.enforce_eager:
        hosts.append("launch_us")
    constants = asdict(given.host_of(host_model(settings.engine_version)))
    found += [_constant(name, "host", constants[name]) for name in hosts if constants[name] > 0]
    if client:
        constants = asdict(given.frontend_of(settings.frontend))
        found += [_constant(name, "frontend", c) for name, c in constants.items() if c > 0]
    return found


def _constant(name: str, group: str, base: float) -> Parameter:
    return Parameter(name, group, name, base, HOST_SPREAD, MOST_HOST, 0.2)


def kept(found: Sequence[Parameter], names: Sequence[str]) -> list[bool]:
    """Which parameters the user wants to stay as they are; UserError for an unknown name."""
    known = [p.field for p in found]
    for name in names:
        if name not in known:
            raise unknown("parameter", name, known)
    return [p.field in names for p in found]


def fit_at(
    found: Sequence[Parameter], theta: FloatArray, base: Profile, frontend: str
) -> ServerFit:
    """The scales and constants at `theta` (logarithms of factors), on top of what `base` has; those
    at 0 are as shipped, and not named."""
    given = server_fit(base)
    tables: dict[str, dict[str, float]] = {
        "scales": dict(given.scales),
        "host": dict(given.host),
        "frontend": dict(given.frontend) if given.frontend_name == frontend else {},
    }
    for p, factor in zip(found, np.exp(theta).tolist(), strict=True):
        if factor != 1.0:
            # Six digits: more would be noise, and equal fits shall be equal files.
            tables[p.group][p.field] = float(f"{p.base * factor:.6g}")
    return ServerFit(tables["scales"], tables["host"], tables["frontend"], frontend)


def with_fit(
    base: Profile, fit: ServerFit, key: Mapping[str, str], points: int = 0, provenance: str = ""
) -> tuple[Entry, ...]:
    """The entries of `base`, with `fit` in the place of an earlier one."""
    entry = Entry(OP, key, fit.to_json(), points, provenance=provenance)
    return (*(e for e in base.entries if e.op != OP), entry)


def bounds(found: Sequence[Parameter]) -> FloatArray:
    """Largest |logarithm of the factor| of each."""
    return np.array([math.log(p.most) for p in found])
