"""Is the content of a profile file what a fit writes? Files are edited by hand, and grow old."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.cost.operators import FORMS, Form
from sim.cost.residual import Residual
from sim.cost.server import OP as SERVER
from sim.cost.server import ServerFit
from sim.errors import UserError, unknown

if TYPE_CHECKING:
    from sim.cost.profile import Entry, Profile

WRONG = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""What reading JSON of another shape than expected ends in."""


MEASURED = ("overhead", "engine", SERVER)
"""Entries beside the operators' fits, each with a reader of its own: `calibrate run` writes the
first two, `calibrate from-logs` the last."""


def check(profile: Profile, where: str) -> None:
    """UserError that names the file and the entry, for anything a prediction would stumble over."""
    for name in ("gpu", "provenance", "created"):
        if not isinstance(getattr(profile, name), str):
            raise UserError(f"{where}: damaged profile: {name!r} must be a text")
    if not isinstance(profile.derived_for, str | None):
        raise UserError(f"{where}: damaged profile: 'derived_for' must be a text")
    if sum(entry.op == SERVER for entry in profile.entries) > 1:
        raise UserError(f"{where}: damaged profile: more than one entry {SERVER!r}")
    for number, entry in enumerate(profile.entries, 1):
        try:
            _check_entry(entry)
        except UserError as error:
            raise UserError(f"{where}: damaged profile: entry {number}: {error}") from None
        except WRONG as error:
            kind = type(error).__name__
            raise UserError(
                f"{where}: damaged profile: entry {number} ({kind}: {error}); fit it again"
            ) from None


def _check_entry(entry: Entry) -> None:
    if entry.op in MEASURED:
        _need(isinstance(entry.fit, dict), "no mapping of what was measured")
        if entry.op == SERVER:
            ServerFit.from_json(entry.fit)
        return
    if entry.op not in FORMS:
        raise unknown("operator", str(entry.op), [*FORMS, *MEASURED])
    form, fit = FORMS[entry.op], entry.fit
    for name, value in entry.key.items():
        _need(isinstance(value, str | int | float), f"key {name!r} is {value!r}")
    for name in ("world", "tp", "ep"):
        _need(int(entry.key.get(name, 1)) >= 1, f"key {name!r} must be at least 1")
    _need("world" in entry.key or entry.op != "collective", "no key 'world'")
    _number(entry.points, "points", least=0)
    for name, (low, high) in entry.ranges.items():
        _need(_number(low, name) <= _number(high, name), f"range of {name!r} is empty")
    for name, value in entry.error.items():
        _number(value, f"error {name!r}", least=0)
    known = [dict(variant) for variant in form.variants]
    _need(fit["variant"] in known, f"no variant {fit['variant']!r}: fit it again")
    for name, bounds in form.coefficients.items():
        if name in form.later and name not in fit["coefficients"]:
            continue
        _need(name in fit["coefficients"], f"no coefficient {name!r}: fit it again")
        value = fit["coefficients"][name]
        _number(value, f"coefficient {name!r}", bounds.low / 100, bounds.high * 100)
    _number(fit.get("burst", 1.0), "burst", 1e-3)
    _number(fit.get("launch_us", 0.0), "launch_us", 0)
    _check_residual(Residual.from_json(fit["residual"]), form)


def _check_residual(residual: Residual, form: Form) -> None:
    points, axes = residual.positions.shape
    num_axes = len(form.covariance[0].lengths)
    _need(axes in (num_axes, form.earlier_axes), f"residual over {axes} axes, not {num_axes}")
    _need(len(residual.weights) == points, "residual with other weights than points")
    finite = np.isfinite(residual.positions).all() and np.isfinite(residual.weights).all()
    _need(bool(finite), "residual that is not finite")
    for component in residual.covariance:
        _number(component.variance, "variance", 0)
        _need(len(component.lengths) == axes, "residual with other lengths than axes")
        for length in component.lengths:
            _need(length is None or _number(length, "length", 1e-9) > 0, "")
        _need(isinstance(component.smooth, bool), f"smooth is {component.smooth!r}")


def _number(value: Any, name: str, least: float = -math.inf, most: float = 1e12) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not least <= value <= most:
        raise UserError(f"{name} must be a number of {least:g} to {most:g}, not {value!r}")
    return float(value)


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)
