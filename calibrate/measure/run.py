"""`calibrate run`: time this machine's kernels and engine for one model, and fit a profile.

Points go to a file beside the profile as they are measured, so an interrupted run goes on where
it stopped when the same command is given again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sim.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N or cpu")
    parser.add_argument(
        "--model", required=True, help="small, small-moe, a built-in name or a model folder"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel GPUs (1)")
    parser.add_argument("--budget", default="5m", help="time to measure: 90s, 5m (5m)")
    parser.add_argument("--dtype", default="bf16", help="bf16 (default), fp16 or fp32")
    parser.add_argument("--out", type=Path, required=True, help="the profile: .json or .json.gz")
    parser.add_argument(
        "--csv", type=Path, metavar="DIR", help="also write the points as CSV files"
    )
    parser.add_argument("--gpu", help="the GPU's name, where the one the driver says is not known")
    parser.add_argument("--no-engine", action="store_true", help="time kernels only")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """0; UserError for a user's mistake."""
    if args.tp < 1:
        raise UserError(f"--tp must be at least 1, got {args.tp}")
    if not args.out.absolute().parent.is_dir():
        raise UserError(f"{args.out}: its folder does not exist")
    if args.csv is not None and not args.csv.is_dir():
        raise UserError(f"{args.csv}: not a folder")
    try:
        from calibrate.measure.campaign import run_campaign
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise UserError(
            f"calibrating needs {error.name}: pip install 'tokentwin[kernels]'"
        ) from error
    run_campaign(args)
    return 0
