"""`validate deployments FILE`: predict the experiments of a file, compare where measured."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from calibrate.validation.errors import Comparison, Row, beside_peers, compare, in_headline, table
from calibrate.validation.experiments import Experiment, load_experiments, select
from calibrate.validation.leave_out import leave_one_model_out, points, refitted
from calibrate.validation.measured import PeerError, peer_errors
from calibrate.validation.report import (
    finite,
    print_errors,
    print_left_out,
    print_peers,
    write_predictions,
)
from calibrate.validation.runs import Prediction, predict_all
from calibrate.validation.runs import Progress as Done
from sim.errors import UserError

PEERS = "peer_errors_open.csv"
"""Taken from beside the experiments when it lies there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, help="experiments, in the layout of experiments_open.json"
    )
    parser.add_argument("--out", type=Path, help="write the predictions to this CSV file")
    parser.add_argument("--seeds", type=int, default=3, help="runs per experiment (default 3)")
    parser.add_argument("--only", metavar="REGEX", help="only experiments whose id matches")
    parser.add_argument("--limit-experiments", type=int, metavar="N", help="only the first N")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one per core)")
    parser.add_argument("--peers", type=Path, help=f"peers' errors (default: {PEERS} beside FILE)")
    parser.add_argument("--details", action="store_true", help="also every compared value")
    parser.add_argument(
        "--leave-one-model-out",
        action="store_true",
        help="instead: predict each model's TPOT with constants fitted on the others",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    for name in ("seeds", "limit_experiments"):
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} must be at least 1, got {value}")
    experiments = load_experiments(args.file)
    chosen = select(experiments, args.only, args.limit_experiments)
    if args.leave_one_model_out:
        return _leave_one_model_out(args, chosen, experiments)
    peers = _peers(args.peers, args.file)
    if args.out is not None:
        write_predictions(args.out, {})  # an unwritable path is found now, not after minutes
    jobs = min(args.jobs or os.cpu_count() or 1, len(chosen))
    with _progress(len(chosen)) as progress:
        predictions = predict_all(chosen, experiments, range(args.seeds), jobs, progress)
    if args.out is not None:
        write_predictions(args.out, {p.experiment: p.values for p in predictions})
    comparisons = [
        c for e, p in zip(chosen, predictions, strict=True) for c in compare(e, p.values)
    ]
    rows = table(chosen, comparisons)
    if args.json:
        tree = _document(args, predictions, comparisons, rows, peers, chosen)
        print(json.dumps(finite(tree), indent=1))
    else:
        _print(args, predictions, comparisons, rows, peers, chosen)
    return 0


def _leave_one_model_out(
    args: argparse.Namespace, chosen: Sequence[Experiment], experiments: Sequence[Experiment]
) -> int:
    stages = points(chosen, experiments)
    if len({s.model for s in stages}) < 2:
        raise UserError("--leave-one-model-out needs measured stable runs of two models or more")
    runs, constants = leave_one_model_out(stages), refitted(stages)
    if args.json:
        tree = {"runs": [run.__dict__ for run in runs], "corrections": constants}
        print(json.dumps(finite(tree), indent=1))
    else:
        print_left_out(runs, constants, sys.stdout)
    return 0


def _print(
    args: argparse.Namespace,
    predictions: Sequence[Prediction],
    comparisons: Sequence[Comparison],
    rows: Sequence[Row],
    peers: Sequence[PeerError],
    chosen: Sequence[Experiment],
) -> None:
    number = f"{len(predictions)} experiment{'s' if len(predictions) != 1 else ''}"
    where = f", predictions in {args.out}" if args.out is not None else ""
    print(f"{number} simulated, {args.seeds} seeds each{where}")
    if args.details:
        for c in comparisons:
            name = f"{c.experiment} stage {c.stage} {c.metric}"
            print(f"{name:<70}{c.predicted:>12.3f}{c.measured:>12.3f}{c.percent:>+8.1f} %")
    if not rows:
        print("none of them carries measurements: nothing to compare")
        return
    print("absolute errors, per cent (fail_frac: percentage points)")
    print_errors(rows, sys.stdout)
    print_peers(beside_peers(comparisons, peers, in_headline(chosen)), sys.stdout)


def _document(
    args: argparse.Namespace,
    predictions: Sequence[Prediction],
    comparisons: Sequence[Comparison],
    rows: Sequence[Row],
    peers: Sequence[PeerError],
    chosen: Sequence[Experiment],
) -> dict[str, Any]:
    return {
        "file": str(args.file),
        "seeds": args.seeds,
        "errors": [row.to_dict() for row in rows],
        "peers": beside_peers(comparisons, peers, in_headline(chosen)),
        "comparisons": [
            {
                "experiment": c.experiment,
                "stage": c.stage,
                "metric": c.metric,
                "predicted": c.predicted,
                "measured": c.measured,
                "percent": c.percent,
            }
            for c in comparisons
        ],
        "predictions": [
            {
                "experiment": p.experiment,
                "notes": p.notes,
                "values": [
                    {
                        "stage": stage,
                        "metric": metric,
                        "value": value,
                        "half_range": p.spread[stage, metric],
                    }
                    for (stage, metric), value in sorted(p.values.items())
                ],
            }
            for p in predictions
        ],
    }


def _peers(given: Path | None, experiments: Path) -> list[PeerError]:
    if given is not None:
        return peer_errors(given)
    beside = experiments.parent / PEERS
    return peer_errors(beside) if beside.is_file() else []


@contextmanager
def _progress(total: int) -> Iterator[Done]:
    """A bar on stderr while the experiments run; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("experiments", total=total)

        def done(experiment: str) -> None:
            bar.update(task, advance=1, description=experiment[:40])

        yield done
