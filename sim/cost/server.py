"""What a server's own logs say of its profile: a scale per operator class, and host constants.

`calibrate from-logs` fits them and stores them as the `server` entry of a profile. A scale
multiplies the device time that the profile predicts for a class of operators in a step; constants
replace those shipped for the engine version and the frontend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from sim.cost.host import FRONTENDS, Frontend, HostModel
from sim.errors import UserError, unknown

if TYPE_CHECKING:
    from sim.cost.profile import Entry, Profile

OP = "server"
CLASSES = ("attention", "linear", "moe", "communication")
"""Operator classes with a scale: the parts of a step but for the host."""
HOST_CONSTANTS = ("sync_us", "sync_per_seq_us", "async_us", "async_per_seq_us", "launch_us")
FRONTEND_CONSTANTS = tuple(f.name for f in fields(Frontend))
LIMIT_US = 1e7
"""More microseconds than this in a constant are taken for a mistake."""


@dataclass(frozen=True)
class ServerFit:
    """Scales and constants fitted on a server's logs; what is not named stays as shipped."""

    scales: Mapping[str, float] = field(default_factory=dict)
    """By operator class (`CLASSES`)."""
    host: Mapping[str, float] = field(default_factory=dict)
    """Fields of `HostModel`, microseconds."""
    frontend: Mapping[str, float] = field(default_factory=dict)
    """Fields of `Frontend`, microseconds, for the frontend named below and no other."""
    frontend_name: str = "http"

    def scale(self, name: str) -> float:
        return self.scales.get(name, 1.0)

    def host_of(self, shipped: HostModel) -> HostModel:
        changed: dict[str, Any] = dict(self.host)
        return replace(shipped, **changed)

    def frontend_of(self, name: str) -> Frontend:
        shipped = FRONTENDS[name]
        changed: dict[str, Any] = dict(self.frontend)
        return replace(shipped, **changed) if name == self.frontend_name else shipped

    def to_json(self) -> dict[str, Any]:
        return {
            "scales": dict(self.scales),
            "host": dict(self.host),
            "frontend": {"name": self.frontend_name, **self.frontend},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ServerFit:
        """Raises UserError that names what is wrong, KeyError for what is missing."""
        frontend = dict(data["frontend"])
        name = frontend.pop("name")
        if name not in FRONTENDS:
            raise unknown("frontend", str(name), FRONTENDS)
        return cls(
            _numbers(data["scales"], "scale", CLASSES, 1e-3, 1e3),
            _numbers(data["host"], "host constant", HOST_CONSTANTS, 0.0, LIMIT_US),
            _numbers(frontend, "frontend constant", FRONTEND_CONSTANTS, 0.0, LIMIT_US),
            name,
        )


def _numbers(
    given: Mapping[str, Any], what: str, known: tuple[str, ...], low: float, high: float
) -> dict[str, float]:
    for name, value in given.items():
        if name not in known:
            raise unknown(what, str(name), known)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:
            raise UserError(f"{what} {name!r} must be {low:g} to {high:g}, not {value!r}")
    return {name: float(value) for name, value in given.items()}


def server_entry(profile: Profile) -> Entry | None:
    """The entry that `calibrate from-logs` wrote, if it did."""
    return next(iter(profile.of(OP)), None)


def server_fit(profile: Profile) -> ServerFit:
    """What the profile says of its server: nothing, unless it was fitted on logs."""
    entry = server_entry(profile)
    return ServerFit() if entry is None else ServerFit.from_json(entry.fit)
