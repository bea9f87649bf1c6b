"""`validate engine`: run a trace on the real engine, simulate it, and compare the two.

Without options a small model is calibrated, a small trace is generated for it, executed on this
machine's CPU and simulated: a complete closed loop in about a minute.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import UserError

if TYPE_CHECKING:
    from calibrate.validation.closed_loop import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument(
        "--model", default="small", help="small, small-moe, a built-in name or a model folder"
    )
    parser.add_argument("--trace", type=Path, help="requests to serve (default: generated)")
    parser.add_argument("--limit", type=int, default=120, metavar="N", help="requests (120)")
    parser.add_argument(
        "--rate-scale", type=float, metavar="X",
        help="requests come X times as fast (default: such that the engine is busy as --load says)",
    )  # fmt: skip
    parser.add_argument("--load", type=float, default=0.5, help="offered load, 0 to 1 (0.5)")
    parser.add_argument("--profile", type=Path, help="use this calibration, made on this machine")
    parser.add_argument("--budget", default="20s", help="time to calibrate: 20s, 5m (20s)")
    parser.add_argument("--dtype", default="bf16", help="bf16 (default), fp16 or fp32")
    parser.add_argument("--wall-clock", action="store_true", help="serve in real time")
    parser.add_argument("--runs", type=int, default=1, help="report the median of so many loops")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", action="append", default=[], metavar="engine.NAME=VALUE", help="engine setting"
    )
    parser.add_argument("--out", type=Path, help="write the calibration to this profile")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """0; UserError for a user's mistake. 1 when the device ran out of memory on the way."""
    _check(args)
    # torch takes seconds to import: only now, when the arguments are right.
    try:
        from calibrate.validation.engine_loop import run_loops
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise UserError(
            f"the real engine needs {error.name}: pip install 'tokentwin[kernels]'"
        ) from error
    loops = run_loops(args)
    if args.json:
        print(json.dumps(document(loops), indent=1))
    else:
        from calibrate.validation.engine_report import print_report

        print_report(loops)
    return 1 if any(c.failure for c in loops.comparisons) else 0


def document(loops: Any) -> dict[str, Any]:
    """The JSON document: the loop with the median step error, and all of them."""
    middle: Comparison = loops.median
    return {
        "device": loops.device["device"],
        "model": loops.model,
        "trace": loops.trace,
        "decisions_equal": all(c.decisions_equal for c in loops.comparisons),
        "raw": loops.errors("raw"),
        "normalised": loops.errors("normalised"),
        "noise": vars(middle.noise),
        "kinds": {k: vars(v) for k, v in middle.kinds.items()},
        "operators": {k: vars(v) for k, v in middle.operators.items()},
        "executed": middle.executed,
        "simulated": middle.simulated,
        "calibration": loops.calibration,
        "clock": loops.clock,
        "runs": [
            {"raw": vars(c.raw), "normalised": c.normalised and vars(c.normalised)}
            for c in loops.comparisons
        ],
        "failure": middle.failure or None,
    }


def _check(args: argparse.Namespace) -> None:
    if args.limit < 1:
        raise UserError(f"--limit must be at least 1, got {args.limit}")
    if args.runs < 1:
        raise UserError(f"--runs must be at least 1, got {args.runs}")
    if not 0 < args.load < 1:
        raise UserError(f"--load must be between 0 and 1, got {args.load:g}")
    if args.rate_scale is not None and not 0 < args.rate_scale < float("inf"):
        raise UserError(f"--rate-scale must be positive, got {args.rate_scale:g}")
