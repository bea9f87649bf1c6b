"""The error table for a person, and the predictions file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from calibrate.validation.errors import HEADLINE, Row
from calibrate.validation.leave_out import LeftOut
from calibrate.validation.outcome import METRICS, Values
from sim.errors import UserError


def write_predictions(path: Path, predictions: Mapping[str, Values]) -> None:
    """CSV `experiment,stage,metric,value`, units as in the README of `ground_truth`."""
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(("experiment", "stage", "metric", "value"))
            for name, values in predictions.items():
                for stage in sorted({stage for stage, _ in values}):
                    for metric in METRICS:
                        value = values[stage, metric]
                        if not np.isnan(value):
                            out.writerow((name, stage, metric, f"{value:.6g}"))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def print_errors(rows: Sequence[Row], out: TextIO) -> None:
    """One block per group: median, mean and worst absolute error of every metric."""
    group = None
    for row in rows:
        if row.group != group:
            group = row.group
            print(f"\n{group}", file=out)
            print(f"  {'metric':<18}{'n':>4}{'median':>9}{'mean':>8}{'worst':>8}  at", file=out)
        figures = "".join(
            f"{x:{w}.1f}" for x, w in ((row.median, 9), (row.mean, 8), (row.worst, 8))
        )
        print(f"  {row.metric:<18}{row.n:>4}{figures}  {row.worst_at}", file=out)


def print_peers(lines: Sequence[Mapping[str, Any]], out: TextIO) -> None:
    """Median / mean error of each simulator, and ours on the same runs in brackets."""
    if not lines:
        return
    print("\nother simulators on these runs, whole run, median / mean error, per cent", file=out)
    print("(ours on the same runs in brackets)", file=out)
    metrics = (*HEADLINE, "e2e_p99")
    print(f"  {'simulator':<42}{'n':>3}  " + "".join(f"{m:<28}" for m in metrics), file=out)
    for line in lines:
        cells = "".join(f"{_cell(line.get(m)):<28}" for m in metrics)
        print(f"  {line['simulator']:<42}{line['n']:>3}  {cells}".rstrip(), file=out)


def _cell(entry: Mapping[str, float] | None) -> str:
    if entry is None:
        return "-"
    theirs = f"{entry['median']:.1f} / {entry['mean']:.1f}"
    return f"{theirs} [{entry['our_median']:.1f} / {entry['our_mean']:.1f}]"


def print_left_out(runs: Sequence[LeftOut], constants: Mapping[str, float], out: TextIO) -> None:
    """TPOT errors with the built-in constants and with those fitted on the other models."""
    print(
        "TPOT, whole run, error in per cent: built-in constants, fitted without the model", file=out
    )
    for run in runs:
        name = f"{run.experiment:<48}{run.model:<18}"
        print(f"  {name}{run.built_in:>+7.1f}{run.refitted:>+7.1f}", file=out)
    for title, values in (
        ("built-in", [abs(r.built_in) for r in runs]),
        ("without the model", [abs(r.refitted) for r in runs]),
    ):
        median, p90 = np.percentile(values, [50, 90])
        print(f"{title}: median {median:.1f}, p90 {p90:.1f}, worst {max(values):.1f}", file=out)
    print("corrections when fitted on all runs:", file=out)
    for name, value in constants.items():
        print(f"  {name}: {value:+.3f}", file=out)


def finite(tree: Any) -> Any:
    """`tree` for JSON: NaN, which JSON does not have, becomes null."""
    if isinstance(tree, float) and np.isnan(tree):
        return None
    if isinstance(tree, Mapping):
        return {str(k): finite(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(v) for v in tree]
    return tree
