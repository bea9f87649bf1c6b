"""Profiles: what was learned about one GPU by timing kernels on it, as data.

A profile is a JSON file (`.json` or `.json.gz`): schema, GPU, provenance, and one entry per
(operator, dtype, KV dtype, engine, kernel, distribution, world size, ...) with its roofline
coefficients and residual. Shipped profiles are in `sim/cost/profiles/`: of GPUs that were timed
(`.json.gz`), and derived ones (`.json`), which name the relative whose entries they have
(`entries_of`; see `sim.cost.derived`).
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

from sim.cost import derived
from sim.cost.hardware import Gpu, catalogue, gpu
from sim.cost.profile_check import check
from sim.errors import UserError, unknown
from sim.files import read_bytes

SCHEMA = 1
TIMED, DERIVED = ".json.gz", ".json"
"""How the files of shipped profiles end, by kind."""


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
        if "entries_of" in data:
            entries = tuple(_timed(data["entries_of"], where).entries)
        else:
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


def save(profile: Profile, path: Path, *, by_reference: bool = False) -> None:
    """Write the profile; compressed when the name ends in `.gz`. `by_reference` names the shipped
    profile that has its entries instead of copying them."""
    head = {
        "schema": SCHEMA,
        "gpu": profile.gpu,
        "created": profile.created,
        "provenance": profile.provenance,
        "meta": profile.meta,
        **({} if profile.derived_for is None else {"derived_for": profile.derived_for}),
        "units": "microseconds; bytes; fractions of the datasheet's peaks",
    }
    if by_reference:
        path.write_text(json.dumps({**head, "entries_of": profile.gpu}, indent=1) + "\n")
        return
    data = {
        **head,
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
    """The shipped profile of the GPU. One that is not built in, or has another datasheet than the
    built-in GPU of that name, gets its nearest relative's on its own datasheet, labelled so."""
    own = _shipped(wanted.name)
    if own is not None and (own.derived_for is None or catalogue().get(wanted.name) == wanted):
        return own
    return derive(wanted)


def derive(wanted: Gpu) -> Profile:
    """The profile of a GPU without timings: the entries of its nearest relative."""
    relative = _relative(wanted)
    card = gpu(relative.gpu)
    return replace(
        relative,
        derived_for=wanted.name,
        provenance=derived.provenance(wanted, card, relative.provenance),
        meta={
            "datasheet": derived.datasheet(wanted),
            "scaled": derived.scaled(wanted, card),
            **relative.meta,
        },
    )


def built_in(wanted: Gpu) -> tuple[Profile, ...]:
    """The shipped profiles that may fill what another lacks: the GPU's own, its relative's."""
    relative, own = _relative(wanted), for_gpu(wanted)
    return (own,) if relative.gpu == own.gpu else (own, relative)


def shipped_names() -> list[str]:
    """GPUs with a profile fitted on timings of their own."""
    return _names(TIMED)


def derived_names() -> list[str]:
    """GPUs with a shipped profile that was derived from a relative's."""
    return _names(DERIVED)


def _names(suffix: str) -> list[str]:
    return sorted(
        p.name.removesuffix(suffix) for p in _folder().iterdir() if p.name.endswith(suffix)
    )


def _folder() -> Traversable:
    return files("sim.cost").joinpath("profiles")


def _relative(card: Gpu) -> Profile:
    return _timed(derived.relative_of(card), f"nearest relative of {card.name}")


def _timed(name: Any, where: str) -> Profile:
    """The shipped profile of a GPU that was timed. Raises UserError naming who asks for it."""
    found = _shipped(name) if isinstance(name, str) else None
    if found is None or found.derived_for is not None:
        raise unknown(f"profile in {where}", str(name), shipped_names())
    return found


@cache
def _shipped(name: str) -> Profile | None:
    """The file of a GPU, by canonical name; None where there is none."""
    for suffix in (TIMED, DERIVED):
        if name in _known(suffix):
            raw = _folder().joinpath(name + suffix).read_bytes()
            data = json.loads(gzip.decompress(raw) if suffix == TIMED else raw)
            return from_json(data, f"profile of {name}")
    return None


@cache
def _known(suffix: str) -> frozenset[str]:
    return frozenset(_names(suffix))
