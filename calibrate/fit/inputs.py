"""What a user gives on the command line, turned into GPUs and points."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from calibrate.fit.points import (
    TIME_COLUMNS,
    NotFittedError,
    Points,
    check_points,
    of_gpu,
    read_points,
    read_table,
    rows_of_gpu,
)
from sim.cost.hardware import Gpu, aliases, gpu, gpu_from_datasheet
from sim.cost.profile import Profile
from sim.errors import UserError, normalise


def read_gpu(name: str, datasheet: Path | None) -> Gpu:
    """A built-in GPU, or the one a datasheet describes, under the given name."""
    if datasheet is None:
        return gpu(name)
    try:
        entry = json.loads(datasheet.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{datasheet}: cannot read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{datasheet}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise UserError(f"{datasheet}: expected a JSON object with the GPU's peaks")
    return replace(gpu_from_datasheet({"name": name, **entry}, str(datasheet)), name=name)


def gpu_of_profile(profile: Profile, datasheet: Path | None) -> Gpu:
    """The GPU a profile was fitted for; it keeps the datasheet of one that is not built in."""
    if datasheet is None and "datasheet" in profile.meta:
        return gpu_from_datasheet(profile.meta["datasheet"], f"profile of {profile.gpu}")
    return read_gpu(profile.derived_for or profile.gpu, datasheet)


def read_points_of(paths: Sequence[Path], card: Gpu, called: str) -> list[Points]:
    """The points of the GPU in all files; rows of other GPUs, rows without a duration and tables
    that cannot be fitted are named on stderr. Raises UserError when nothing is left."""
    names = (*aliases(card), called)
    found = []
    for path in paths:
        table = read_table(path)
        mine = rows_of_gpu(table, names)
        if len(mine) < len(table):
            print(f"{path}: {len(table) - len(mine)} rows of other GPUs left out", file=sys.stderr)
        table = _lasting(mine)
        if len(table) < len(mine):
            print(f"{path}: {len(mine) - len(table)} rows of 0 us left out", file=sys.stderr)
        try:
            points = check_points(table, str(path))
        except NotFittedError as error:
            if len(paths) == 1:
                raise
            print(f"skipped: {error}", file=sys.stderr)
            continue
        if len(table) and points.us is None:
            raise UserError(f"{path}: no column 'us' (measured microseconds)")
        if len(table):
            found.append(points)
    if not found:
        raise UserError(f"no points of {card.name} in {', '.join(map(str, paths))}")
    return found


def _lasting(table: pd.DataFrame) -> pd.DataFrame:
    """Without rows whose time the measurement rounded to zero: they have no logarithm to fit."""
    for name in TIME_COLUMNS:
        if name in table:
            table = table[pd.to_numeric(table[name], errors="coerce") != 0]
    return table


def read_points_to_predict(path: Path, card: Gpu, called: str) -> Points:
    """All rows of a file, which must be of the profile's GPU; they need no times."""
    points = read_points(path, timed=False)
    mine = of_gpu(points, (*aliases(card), called))
    if len(mine.table) < len(points.table):
        wanted = {normalise(n) for n in (*aliases(card), called)}
        strangers = {str(n) for n in points.table["gpu"] if normalise(str(n)) not in wanted}
        raise UserError(
            f"{path}: rows of {', '.join(sorted(strangers)[:3])}, but the profile is for "
            f"{card.name}; give only rows of that GPU"
        )
    return points
