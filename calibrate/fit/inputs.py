"""What a user gives on the command line, turned into GPUs and points."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibrate.fit.points import Points, of_gpu, read_points
from sim.cost.hardware import Gpu, aliases, gpu, gpu_from_datasheet
from sim.cost.operators import FORMS
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
    """The points of the GPU in all files; rows of other GPUs and operators that cannot be fitted
    are counted on stderr. Raises UserError when nothing is left."""
    names = (*aliases(card), called)
    found = []
    for path in paths:
        points = read_points(path)
        if points.op not in FORMS:
            print(f"{path}: {points.op} points are not fitted, skipped", file=sys.stderr)
            continue
        mine = of_gpu(points, names)
        others = len(points.table) - len(mine.table)
        if others:
            print(f"{path}: {others} rows of other GPUs left out", file=sys.stderr)
        if len(mine.table) and mine.us is None:
            raise UserError(f"{path}: no column 'us' (measured microseconds)")
        if len(mine.table):
            found.append(mine)
    if not found:
        raise UserError(f"no points of {card.name} in {', '.join(map(str, paths))}")
    return found


def read_points_to_predict(path: Path, card: Gpu, called: str) -> Points:
    """All rows of a file, which must be of the profile's GPU."""
    points = read_points(path)
    if points.op not in FORMS:
        raise UserError(f"{path}: {points.op} points cannot be predicted by a profile")
    mine = of_gpu(points, (*aliases(card), called))
    if len(mine.table) < len(points.table):
        wanted = {normalise(n) for n in (*aliases(card), called)}
        strangers = {str(n) for n in points.table["gpu"] if normalise(str(n)) not in wanted}
        raise UserError(
            f"{path}: rows of {', '.join(sorted(strangers)[:3])}, but the profile is for "
            f"{card.name}; give only rows of that GPU"
        )
    return points
