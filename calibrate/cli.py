"""The command `calibrate`: profiles of GPUs from measured points, and how good they are."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import NoReturn

from calibrate.logs import command as from_logs
from calibrate.measure import run
from sim.errors import UserError


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 2 for a user's mistake."""
    try:
        args = _parser().parse_args(argv)
        result: int = args.run(args)
        return result
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; nothing may be flushed to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="calibrate", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    measure = commands.add_parser(
        "run", help="time this machine for a model and fit a profile", description=run.__doc__
    )
    run.add_arguments(measure)
    measure.set_defaults(run=run.run)

    fit = commands.add_parser("fit", help="fit a profile from measured points")
    fit.add_argument("points", nargs="+", type=Path, metavar="POINTS.csv[.gz]")
    fit.add_argument("--gpu", required=True, help="the GPU that was timed, such as H100-SXM")
    fit.add_argument("--out", required=True, type=Path, help="profile to write (.json, .json.gz)")
    fit.add_argument("--datasheet", type=Path, help="JSON with the peaks of a GPU not built in")
    fit.add_argument("--source", default="", help="where the points come from, for the profile")
    fit.set_defaults(run=_fit)

    predict = commands.add_parser("predict", help="predict the times of points")
    predict.add_argument("points", type=Path, metavar="POINTS.csv[.gz]")
    predict.add_argument("--profile", required=True, type=Path)
    predict.add_argument("--out", required=True, type=Path, help="CSV to write")
    predict.add_argument("--datasheet", type=Path, help="as for fit")
    predict.set_defaults(run=_predict)

    logs = commands.add_parser(
        "from-logs", help="fit a profile to a running server's logs", description=from_logs.__doc__
    )
    from_logs.add_arguments(logs)
    logs.set_defaults(run=from_logs.run)

    report = commands.add_parser("report", help="fit and hold-out errors per operator, and plots")
    report.add_argument("points", nargs="+", type=Path, metavar="POINTS.csv[.gz]")
    report.add_argument("--gpu", required=True)
    report.add_argument("--out", type=Path, help="folder for the plots")
    report.add_argument("--datasheet", type=Path, help="as for fit")
    report.add_argument(
        "--floor",
        action="store_true",
        help="also the error of one in seven points when all others are known (slow)",
    )
    report.set_defaults(run=_report)
    return parser


def _check_folder(out: Path) -> None:
    """Before the work: is there a place for its result?"""
    if not out.parent.is_dir() or out.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(f"{out}: cannot be written; --out is a file in a folder that exists")


def _fit(args: argparse.Namespace) -> int:
    from calibrate.fit.inputs import read_gpu, read_points_of
    from calibrate.fit.profile import fit_profile
    from sim.cost.predictor import describe
    from sim.cost.profile import Entry, save

    _check_folder(args.out)
    gpu = read_gpu(args.gpu, args.datasheet)
    points = read_points_of(args.points, gpu, args.gpu)

    def show(entry: Entry) -> None:
        error = entry.error
        print(
            f"{describe(entry)}: {entry.points} points, error of the fit "
            f"{error['median']:.1f} % median, {error['p90']:.1f} % p90",
            file=sys.stderr,
        )

    names = ", ".join(p.name for p in args.points)
    profile = fit_profile(
        points,
        gpu,
        provenance=f"fitted on {args.source or names}",
        created=date.today().isoformat(),
        meta={} if args.datasheet is None else {"datasheet": asdict(gpu)},
        progress=show,
    )
    save(profile, args.out)
    print(
        f"{args.out}: {gpu.name}, {len(profile.entries)} operators, "
        f"{time.process_time():.1f} s of CPU",
        file=sys.stderr,
    )
    return 0


def _predict(args: argparse.Namespace) -> int:
    from calibrate.fit.inputs import gpu_of_profile, read_points_to_predict
    from calibrate.fit.points import read_table
    from calibrate.fit.profile import predict_points
    from sim.cost.predictor import Predictor
    from sim.cost.profile import load
    from sim.cost.server import server_entry

    _check_folder(args.out)
    profile = load(args.profile)
    if server_entry(profile) is not None:
        # A server's logs scale what its steps spend on a class, not the calls timed alone.
        print(
            f"{args.profile}: single calls are predicted without the scales of a server's steps",
            file=sys.stderr,
        )
    gpu = gpu_of_profile(profile, args.datasheet)
    points = read_points_to_predict(args.points, gpu, profile.gpu)
    found = predict_points(points, Predictor(profile, gpu))
    table = read_table(args.points)
    table["predicted_us"] = found.us
    table["extrapolated"] = found.other_key | found.outside
    table.to_csv(args.out, index=False)
    for count, why in (
        (found.other_key.sum(), "of an operator that was not fitted: the nearest one's times"),
        (found.outside.sum(), "beyond the sizes that were fitted"),
    ):
        if count:
            print(f"{args.points}: {count} of {len(table)} rows are {why}", file=sys.stderr)
    print(f"{args.out}: {len(table)} rows, {time.process_time():.1f} s of CPU", file=sys.stderr)
    return 0


def _report(args: argparse.Namespace) -> int:
    from calibrate.fit.inputs import read_gpu, read_points_of
    from calibrate.fit.report import report

    gpu = read_gpu(args.gpu, args.datasheet)
    points = read_points_of(args.points, gpu, args.gpu)
    rows = report(points, gpu, args.out, floor=args.floor)
    if not rows:
        raise UserError("too few points for a hold-out test (at least 20 of one operator)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
