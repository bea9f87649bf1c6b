"""Fit a whole profile from the points of one GPU, and predict points with a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from calibrate.fit.operator import fit_operator
from calibrate.fit.points import Points
from sim.cost.hardware import Gpu
from sim.cost.operators import FORMS
from sim.cost.operators.base import Array, Columns
from sim.cost.predictor import Operator, Predictor
from sim.cost.profile import Entry, Profile

PER_REPLAY = ("prefill", "decode")
REPLAY_US = 4.0
"""aiconfigurator timed attention as one call per CUDA-graph replay, so its points hold a graph
launch that a call inside a model's graph does not pay. (4 us: fitted on the open deployments; 1.2 %
median error of the decode step when leaving a model out.)"""
COMPUTING = ("gemm", "moe")
BURST = {"aic": 1.15, "lls": 1.06}
"""How much slower products run on a GPU that is busy all the time than in the bursts in which they
were timed, by source. On H100 from 400 rows on, LLMServingSim's are 7 % slower than
aiconfigurator's, Vidur's 10 to 30 %; a saturated deployment with cold prompts asks for 15 %."""


@dataclass(frozen=True)
class Group:
    """The points of one operator under one key."""

    op: str
    key: dict[str, Any]
    columns: Columns
    us: Array
    sources: frozenset[str] = frozenset()
    """The `source` column's values."""

    def __len__(self) -> int:
        return len(self.us)


def groups(points: Sequence[Points]) -> Iterator[Group]:
    """The measured points of all files by operator and key, in the order of these. Files of the
    same operator and key are one group."""
    parts: dict[tuple[Any, ...], list[tuple[Columns, Array]]] = {}
    sources: dict[tuple[Any, ...], set[str]] = {}
    keys: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for p in points:
        us = p.us
        if us is None or p.op not in FORMS or not len(us):
            continue
        sizes, key_table = p.sizes(), p.keys()
        source = p.table["source"].astype(str).to_numpy() if "source" in p.table else None
        for key, rows in _by_key(key_table):
            name = (p.op, *sorted((k, str(v)) for k, v in key.items()))
            keys[name] = (p.op, key)
            if source is not None:
                sources.setdefault(name, set()).update(source[rows].tolist())
            parts.setdefault(name, []).append(({n: c[rows] for n, c in sizes.items()}, us[rows]))
    for name, pieces in sorted(parts.items()):
        op, key = keys[name]
        columns = {n: np.concatenate([c[n] for c, _ in pieces]) for n in pieces[0][0]}
        us = np.concatenate([u for _, u in pieces])
        yield Group(op, key, columns, us, frozenset(sources.get(name, ())))


def _by_key(keys: pd.DataFrame) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """(key, positions) of each distinct row of a key table."""
    if not len(keys.columns):
        yield {}, np.arange(len(keys))
        return
    numbered = keys.reset_index(drop=True)
    for key, rows in numbered.groupby(list(keys.columns), sort=True).indices.items():
        values = key if isinstance(key, tuple) else (key,)
        plain = [v.item() if hasattr(v, "item") else v for v in values]
        yield dict(zip(keys.columns, plain, strict=True)), np.asarray(rows)


def fit_group(group: Group, gpu: Gpu, provenance: str = "") -> Entry:
    """The profile's entry of a group, with the errors of the fit on its own points, per cent."""
    form = FORMS[group.op]
    key = {k: v for k, v in group.key.items() if v != ""}
    if "dtype" in form.keys:
        key.setdefault("dtype", "bf16")
    fit = fit_operator(form, group.columns, group.us, gpu, key)
    source = next(iter(group.sources)) if len(group.sources) == 1 else ""
    if group.op in PER_REPLAY and source == "aic":
        fit["launch_us"] = REPLAY_US
    if group.op in COMPUTING and source in BURST:
        fit["burst"] = BURST[source]
    entry = Entry(group.op, key, fit, len(group), _ranges(group), {}, provenance)
    median, p90 = errors(Operator(form, entry, gpu).us(group.columns), group.us)
    return Entry(
        group.op, key, fit, len(group), _ranges(group), {"median": median, "p90": p90}, provenance
    )


def _ranges(group: Group) -> dict[str, tuple[float, float]]:
    return {n: (float(c.min()), float(c.max())) for n, c in group.columns.items()}


def errors(predicted: Array, measured: Array) -> tuple[float, float]:
    """(median, 90th percentile) of the absolute relative error, per cent."""
    off = 100 * np.abs(predicted / measured - 1)
    return round(float(np.median(off)), 2), round(float(np.percentile(off, 90)), 2)


def fit_profile(
    points: Sequence[Points],
    gpu: Gpu,
    *,
    provenance: str,
    created: str,
    meta: Mapping[str, Any] | None = None,
    progress: Callable[[Entry], None] | None = None,
) -> Profile:
    """A profile of all groups. Deterministic: equal points give an equal profile."""
    entries = []
    for group in groups(points):
        entry = fit_group(group, gpu, provenance)
        entries.append(entry)
        if progress is not None:
            progress(entry)
    return Profile(gpu.name, tuple(entries), provenance, created, meta=meta or {})


@dataclass(frozen=True)
class Predictions:
    """Per row: microseconds, and how far the profile is from having been fitted on the like."""

    us: Array
    other_key: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """No entry has the row's key: the nearest one stands for it, perhaps a built-in profile's."""
    outside: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """A size is smaller or larger than any that the entry was fitted on."""


def predict_points(points: Points, predictor: Predictor) -> Predictions:
    """Predictions of every row, in row order."""
    sizes, keys = points.sizes(), points.keys()
    rows = len(points.table)
    us, other_key, outside = np.full(rows, np.nan), np.zeros(rows, bool), np.zeros(rows, bool)
    for key, at in _by_key(keys):
        shown = {k: v for k, v in key.items() if v != ""}
        columns = {n: c[at] for n, c in sizes.items()}
        us[at] = predictor.points_us(points.op, columns, shown)
        other_key[at] = not any(_has(e, shown) for e in predictor.profile.of(points.op))
        for name, values in columns.items():
            low, high = predictor.range_of(points.op, name, **shown)
            outside[at] |= (values < low) | (values > high)
    return Predictions(us, other_key, outside)


def _has(entry: Entry, key: Mapping[str, Any]) -> bool:
    return all(str(entry.key.get(name, "")) == str(value) for name, value in key.items())
