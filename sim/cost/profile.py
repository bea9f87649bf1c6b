"""Profiles: what was learned about one GPU by timing kernels on it, as data.

A profile is a JSON file (`.json` or `.json.gz`): schema, GPU, provenance, and one entry per
(operator, dtype, KV dtype, engine, kernel, distribution, world size, ...) with its roofline
coefficients and residual. Shipped profiles are in `sim/cost/profiles/`; another GPU borrows the
coefficients of its nearest relative on its own datasheet, and says so.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from sim.cost.hardware import Gpu, gpu
from sim.cost.profile_check import check
from sim.errors import UserError
from sim.files import read_bytes

SCHEMA = 1

RELATIVES: Mapping[str, str] = {
    "volta": "A100-80G",
    "ampere": "A100-80G",
    "ada": "L40S",
    "hopper": "H100-SXM",
    "blackwell": "B200-SXM",
    "blackwell-consumer": "RTX-PRO-6000-SE",
    "cdna3": "H100-SXM",
    "unknown": "A100-80G",
}
"""Whose kernels a GPU without a profile of its own is assumed to run, by architecture."""


@dataclass(frozen=True)
class Entry:
    """What was fitted for one operator under one key."""

    op: str
    key: Mapping[str, Any]
    """dtype, kv_dtype, engine, kernel, distribution, world, impl, ...: those that apply."""
    fit: Mapping[str, Any]
    """Coefficients and residual, in the form of the operator's predictor."""
    points: int = 0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Calibrated range of each column; beyond it a prediction is an extrapolation."""
    error: Mapping[str, float] = field(default_factory=dict)
    """Errors of the fit, per cent: `median`, `p90`, and of the hold-out where made."""
    provenance: str = ""


@dataclass(frozen=True)
class Profile:
    gpu: str
    """Canonical name of the GPU that was timed."""
    entries: Sequence[Entry]
    provenance: str
    created: str = ""
    derived_for: str | None = None
    """The GPU that borrows this profile, when it is not its own."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Driver, library and engine versions, sources and licences."""

    @property
    def label(self) -> str:
        if self.derived_for is None:
            return self.gpu
        return f"{self.derived_for} (datasheet, efficiencies of {self.gpu})"

    def of(self, op: str) -> Iterator[Entry]:
        return (e for e in self.entries if e.op == op)

    def require(self, wanted: Gpu) -> None:
        """Raises UserError unless the profile is for this GPU."""
        if (self.derived_for or self.gpu) != wanted.name:
            raise UserError(
                f"the profile is for {self.derived_for or self.gpu}, not for {wanted.name}; "
                f"use a profile of {wanted.name}, or none to take the built-in one"
            )


def load(path: Path) -> Profile:
    """The profile in a `.json` or `.json.gz` file. Raises UserError naming the file."""
    raw = read_bytes(path, "cannot read the profile")
    try:
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
        raise UserError(f"{path}: not a profile ({error})") from error
    profile = from_json(data, str(path))
    check(profile, str(path))
    return profile


def from_json(data: Any, where: str) -> Profile:
    if not isinstance(data, dict) or "schema" not in data or "gpu" not in data:
        raise UserError(f"{where}: not a profile (no 'schema' and 'gpu')")
    if data["schema"] != SCHEMA:
        raise UserError(
            f"{where}: profile schema {data['schema']!r}, this version reads {SCHEMA}; fit it again"
        )
    try:
        entries = tuple(Entry(**e) for e in data["entries"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{where}: damaged profile ({error})") from error
    return Profile(
        gpu=data["gpu"],
        entries=entries,
        provenance=data.get("provenance", ""),
        created=data.get("created", ""),
        derived_for=data.get("derived_for"),
        meta=data.get("meta", {}),
    )


def save(profile: Profile, path: Path) -> None:
    """Write the profile; compressed when the name ends in `.gz`."""
    data = {
        "schema": SCHEMA,
        "gpu": profile.gpu,
        "created": profile.created,
        "provenance": profile.provenance,
        "meta": profile.meta,
        **({} if profile.derived_for is None else {"derived_for": profile.derived_for}),
        "units": "microseconds; bytes; fractions of the datasheet's peaks",
        "entries": [
            {
                "op": e.op,
                "key": dict(e.key),
                "points": e.points,
                "ranges": dict(e.ranges),
                "error": dict(e.error),
                "provenance": e.provenance,
                "fit": dict(e.fit),
            }
            for e in profile.entries
        ],
    }
    text = json.dumps(data, separators=(",", ":")).encode()
    if path.suffix == ".gz":
        # No time stamp in the header: equal profiles are equal files.
        text = gzip.compress(text, mtime=0)
    path.write_bytes(text)


def for_gpu(wanted: Gpu) -> Profile:
    """The shipped profile of the GPU, or of its nearest relative, labelled as derived."""
    own = _shipped(wanted.name)
    if own is not None:
        return own
    relative = _shipped(RELATIVES.get(wanted.arch, "A100-80G"))
    if relative is None:
        raise UserError(f"no built-in profile for {wanted.name}; give one made by `calibrate`")
    return replace(relative, derived_for=wanted.name)


def built_in(wanted: Gpu) -> tuple[Profile, ...]:
    """The shipped profiles that may fill what another lacks: the GPU's own, its relative's."""
    relative = _shipped(RELATIVES.get(wanted.arch, "A100-80G"))
    own = for_gpu(wanted)
    return (own,) if relative is None or relative.gpu == own.gpu else (own, relative)


def shipped_names() -> list[str]:
    """GPUs with a profile of their own."""
    suffix = ".json.gz"
    return sorted(
        p.name.removesuffix(suffix) for p in _folder().iterdir() if p.name.endswith(suffix)
    )


def _folder() -> Traversable:
    return files("sim.cost").joinpath("profiles")


@cache
def _shipped(name: str) -> Profile | None:
    path = _folder().joinpath(f"{gpu(name).name}.json.gz") if name in _known() else None
    if path is None or not path.is_file():
        return None
    data = json.loads(gzip.decompress(path.read_bytes()))
    return from_json(data, f"profile of {name}")


@cache
def _known() -> frozenset[str]:
    return frozenset(shipped_names())
