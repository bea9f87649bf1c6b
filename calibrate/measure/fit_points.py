"""From the points measured here to entries of a profile, and how well they predict others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from calibrate.fit.points import Points, check_points
from calibrate.fit.profile import Group, errors, fit_group, groups
from sim.cost.hardware import Gpu
from sim.cost.operators import FORMS
from sim.cost.predictor import Operator
from sim.cost.profile import Entry

HOLD_OUT = 4
"""Every so many-th point is held out to check a fit of the others; the first two, which are the
ends of the range, never are."""
FEWEST = 6
"""Points of a group that is worth a fit."""


@dataclass(frozen=True)
class PointFit:
    """What was fitted for one operator under one key."""

    entry: Entry
    """On all points; its `error` also has those of the hold-out."""
    holdout_median: float
    """Per cent; NaN where too few points were there to hold any out."""
    holdout_p90: float
    held: int


def fit_tables(
    tables: Mapping[str, Sequence[Mapping[str, Any]]], gpu: Gpu, provenance: str
) -> list[PointFit]:
    """Fit every operator of `PointStore.tables`, group by group (dtype, kernel, distribution)."""
    points: list[Points] = [
        check_points(pd.DataFrame(list(rows)), name) for name, rows in tables.items() if rows
    ]
    return [_fit(group, gpu, provenance) for group in groups(points) if len(group) >= FEWEST]


def _fit(group: Group, gpu: Gpu, provenance: str) -> PointFit:
    held = np.arange(len(group)) % HOLD_OUT == HOLD_OUT - 1
    partial = fit_group(_part(group, ~held), gpu)
    predicted = Operator(FORMS[group.op], partial, gpu).us(_part(group, held).columns)
    median, p90 = errors(predicted, group.us[held])
    entry = fit_group(group, gpu, provenance)
    seen = {**entry.error, "holdout_median": median, "holdout_p90": p90}
    return PointFit(replace(entry, error=seen), median, p90, int(held.sum()))


def _part(group: Group, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> Group:
    columns = {name: column[rows] for name, column in group.columns.items()}
    return replace(group, columns=columns, us=group.us[rows])
