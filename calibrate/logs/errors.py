"""Errors of predictions against records, on the part that was fitted and on the part held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calibrate.logs.records import FloatArray
from sim.errors import UserError

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Error:
    """Of one quantity, per cent of what was recorded."""

    count: int
    bias: float
    """Of the mean: positive is too slow."""
    median: float
    """Of the single records, absolute."""
    p90: float


def error(predicted: FloatArray, recorded: FloatArray) -> Error | None:
    """None where nothing was recorded, or nothing predicted of it."""
    both = np.isfinite(predicted) & np.isfinite(recorded) & (recorded > 0)
    if not both.any():
        return None
    was, would = recorded[both], predicted[both]
    size = np.abs(would / was - 1)
    return Error(
        int(both.sum()),
        100 * float(would.mean() / was.mean() - 1),
        100 * float(np.median(size)),
        100 * float(np.quantile(size, 0.9)),
    )


def split(text: str, lengths: Sequence[int]) -> list[Mask]:
    """Which records of each run are fitted: `last:0.3` holds out the last 30 %, `alternate` every
    second one, `none` nothing."""
    kind, colon, part = text.partition(":")
    if text == "none":
        return [np.ones(n, dtype=np.bool_) for n in lengths]
    if text == "alternate":
        return [np.arange(n) % 2 == 0 for n in lengths]
    try:
        share = float(part) if colon else 0.3
    except ValueError:
        share = -1.0
    if kind != "last" or not 0.05 <= share <= 0.9:
        raise UserError(f"--hold-out {text}: write last:0.3 (0.05 to 0.9), alternate or none")
    return [np.arange(n) < n - round(n * share) for n in lengths]


Errors = Mapping[str, Mapping[str, Error]]
"""quantity -> `fitted` and `held out` -> error; without what there is nothing to say about."""


def errors(
    quantities: Mapping[str, Sequence[tuple[FloatArray, FloatArray]]], fitted: Sequence[Mask]
) -> Errors:
    """`quantities` are one (predicted, recorded) per run by name; `fitted` masks the runs."""
    table: dict[str, dict[str, Error]] = {}
    for name, runs in quantities.items():
        for part, flip in (("fitted", False), ("held out", True)):
            pairs = [
                (p[mask != flip], r[mask != flip])
                for (p, r), mask in zip(runs, fitted, strict=True)
            ]
            found = error(*(np.concatenate(column) for column in zip(*pairs, strict=True)))
            if found is not None:
                table.setdefault(name, {})[part] = found
    return table
