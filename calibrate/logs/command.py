"""Fit a profile to the logs of a running server: host constants, and a scale per operator class."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import UserError

if TYPE_CHECKING:  # the simulator is only loaded when logs are fitted
    from calibrate.logs.fit import Fitted
    from calibrate.logs.records import Records
    from sim.cost.profile import Profile
    from sim.scenario import Scenario
    from sim.system import System


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="result of vllm bench serve (--save-result --save-detailed), GuideLLM or "
        "inference-perf, or a table with --columns",
    )
    parser.add_argument(
        "--columns",
        metavar="K=COL,..",
        help="arrival=ts,prompt=in_tok,output=out_tok,ttft=..,e2e=.. for requests, "
        "duration=..,decodes=..,context=..,prefill_tokens=.. for steps; times in seconds, or "
        "ttft_ms=..",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="profile to write")
    parser.add_argument("--model", metavar="NAME", help="what served: a name or a config.json")
    parser.add_argument("--gpu", metavar="NAME", help="a100-80g, h100, l40s, ...")
    parser.add_argument("--tp", metavar="N", help="GPUs of the server (tensor parallel)")
    parser.add_argument("--config", metavar="FILE", help="scenario.yaml of the server")
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="any scenario field: engine.max_num_seqs=128, cost.engine_version=0.15.1",
    )
    parser.add_argument("--profile", metavar="FILE", help="to start from, not the built-in one")
    parser.add_argument(
        "--hold-out",
        metavar="HOW",
        default="last:0.3",
        help="records not fitted but compared: last:0.3 (of every log), alternate, none",
    )
    parser.add_argument(
        "--keep", metavar="NAMES", default="", help="parameters not to fit: attention,delivery_us"
    )
    parser.add_argument(
        "--output-tokens", type=int, metavar="N", help="what every request really generated"
    )
    parser.add_argument("--skip-bad-rows", action="store_true", help="count bad rows, do not fail")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Read, fit, write the profile, print the errors before and after."""
    from calibrate.logs.errors import split
    from calibrate.logs.fit import fit_logs
    from calibrate.logs.read import read_logs
    from calibrate.logs.report import document, text
    from sim.cost.profile import for_gpu, load, save
    from sim.system import System

    out = Path(args.out)
    if not out.name.endswith((".json", ".json.gz")):
        raise UserError(f"--out {args.out}: a profile is a .json or .json.gz file")
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out {args.out}: no file can be written there")
    scenario = scenario_of(args)
    system = System.of(scenario)
    base = for_gpu(system.gpu) if args.profile is None else load(Path(args.profile))
    base.require(system.gpu)
    logs = read_logs(
        args.logs,
        args.columns,
        output_tokens=args.output_tokens,
        skip_bad_rows=args.skip_bad_rows,
    )
    masks = split(args.hold_out, [len(log) for log in logs])
    keep = [name.strip() for name in args.keep.split(",") if name.strip()]
    progress = _progress if sys.stderr.isatty() and not args.json else None
    fitted = fit_logs(logs, system, base, masks, keep=keep, progress=progress)
    if progress is not None:
        print("\r\033[K", end="", file=sys.stderr)
    profile = fitted_profile(base, fitted, logs, system)
    try:
        save(profile, out)
    except OSError as error:
        raise UserError(f"--out {args.out}: cannot be written: {error.strerror}") from None
    show = document if args.json else text
    shown = show(logs, system, base, fitted, args.out)
    print(json.dumps(shown, indent=2) if args.json else shown)
    return 0


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The server of the flags, as `simulate` takes them: `--config`, then flags, then `--set`."""
    from sim.scenario import Scenario
    from sim.tree import read_yaml, set_path, set_text

    tree: dict[str, Any] = read_yaml(args.config) if args.config is not None else {}
    flags = {"model": args.model, "gpu": args.gpu, "engine.tensor_parallel_size": args.tp}
    for path, value in flags.items():
        if value is not None:
            set_path(tree, path, value)
    for setting in args.set:
        set_text(tree, setting)
    for name in ("model", "gpu"):
        if name not in tree:
            raise UserError(f"--{name} is missing: say what served (or give --config)")
    # The load is in the logs, and nobody asks for its capacity.
    for name in ("trace", "generate", "limit", "start_s", "end_s", "rate_scale"):
        tree.pop(name, None)
    tree["capacity_probe"] = False
    scenario = Scenario.from_dict(tree)
    if scenario.cost.profile is not None:
        raise UserError("give the profile to start from as --profile, not as cost.profile")
    if scenario.execute.device is not None:
        raise UserError("logs of a server are fitted by simulation: leave execute.device out")
    return scenario


def fitted_profile(base: Profile, fitted: Fitted, logs: list[Records], system: System) -> Profile:
    """`base` with what was fitted, and where it is from."""
    from calibrate.logs.parameters import with_fit

    settings = system.scenario.cost
    names = ", ".join(f"{log.name} ({log.format})" for log in logs)
    provenance = f"fitted on {fitted.num_fitted} records of {names}"
    key = {
        "model": system.model.name,
        "engine_version": settings.engine_version,
        "frontend": settings.frontend,
    }
    return replace(
        base,
        entries=with_fit(base, fitted.fit, key, fitted.num_fitted, provenance),
        provenance=f"{base.provenance}; scales and host constants {provenance}",
        created=date.today().isoformat(),
    )


def _progress(simulations: int) -> None:
    print(f"\r{simulations} simulations", end="", file=sys.stderr, flush=True)
