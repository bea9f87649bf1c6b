"""The `simulate` command: flags to a scenario, a run, a table or JSON on stdout.

Everything else goes to stderr. Exit status: 0 done, 2 a user's mistake (one line says what),
130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sim.errors import UserError, normalise, unknown

if TYPE_CHECKING:
    from sim.request import Trace
    from sim.result import Result
    from sim.run import Simulation
    from sim.scenario import Scenario

EPILOG = """\
examples:
  simulate --trace azure.csv
  simulate --trace azure.csv --model llama-3-70b --gpu h100 --tp 4 --replicas 2
  simulate --generate 'poisson:rate=8,n=5000,prompt=lognormal(1020,2735),output=256'
  simulate --trace azure.csv --compare chunked,continuous,static --slo ttft=1,tpot=0.05
  simulate --trace azure.csv --set engine.max_num_batched_tokens=512 --out results
  simulate --config results/scenario.yaml --json
"""


class Parser(argparse.ArgumentParser):
    """argparse, with mistakes as UserError: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            words = message.split(": ", 1)[1].split()
            if words and words[0].startswith("--"):
                raise unknown("flag", words[0].split("=")[0], self._option_string_actions)
        raise UserError(f"{message} (simulate --help lists the flags)")


def build_parser() -> Parser:
    parser = Parser(
        prog="simulate",
        description="Simulate an LLM serving system on a trace of requests.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("requests")
    what.add_argument(
        "--trace", metavar="FILE", help="Azure, Mooncake or Vidur trace, or --columns"
    )
    what.add_argument("--generate", metavar="SPEC", help="a synthetic workload instead")
    what.add_argument("--format", metavar="NAME", help="trace format, instead of detecting it")
    what.add_argument(
        "--columns", metavar="K=COL,..", help="arrival=ts,prompt=in_tok,output=out_tok"
    )
    what.add_argument("--arrivals", metavar="SPEC", help="arrival process for a file without one")
    what.add_argument("--skip-bad-rows", action="store_true", help="count bad rows, do not fail")
    what.add_argument("--limit", metavar="N", help="only the first N requests")
    what.add_argument("--rate-scale", metavar="X", help="requests come X times faster")
    system = parser.add_argument_group("system")
    system.add_argument("--model", metavar="NAME", help="built-in name or a config.json")
    system.add_argument("--gpu", metavar="NAME", help="a100-80g, h100, l40s, ...")
    system.add_argument("--replicas", metavar="N", help="number of replicas")
    system.add_argument("--tp", metavar="N", help="GPUs per replica (tensor parallel)")
    system.add_argument("--policy", metavar="NAME", help="scheduling policy, or file.py:Class")
    system.add_argument("--routing", metavar="NAME", help="routing policy, or file.py:Class")
    system.add_argument("--compare", metavar="A,B,..", help="several scheduling policies in turn")
    system.add_argument(
        "--slo", metavar="K=S,..", help="limits in seconds: ttft=1,tpot=0.05,e2e=20"
    )
    system.add_argument(
        "--execute", metavar="DEVICE", nargs="?", const="auto",
        help="run the steps on the real engine: cpu, cuda (default: the GPU if there is one)",
    )  # fmt: skip
    system.add_argument("--wall-clock", action="store_true", help="with --execute: in real time")
    system.add_argument("--seed", metavar="N", help="seed of everything random")
    system.add_argument("--no-fast-forward", action="store_true", help="walk every single step")
    system.add_argument("--config", metavar="FILE", help="scenario.yaml; flags override it")
    system.add_argument(
        "--set", metavar="PATH=VALUE", action="append", default=[], help="any scenario field"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON document")
    output.add_argument("--out", metavar="DIR", help="write tables, summary and scenario there")
    output.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `simulate` command; returns the exit status."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller (`>&-`)
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        _run(build_parser().parse_args(argv))
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{clear}simulate: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (`| head`) has gone
        return 141
    except (Exception, SystemExit) as error:  # --help exits, and so may a user's policy
        place = _users_code(error)
        if place is None:
            raise
        return _fail(f"{place}: {type(error).__name__}: {error}")
    return 0


def _run(args: argparse.Namespace) -> None:
    from sim.output import prepare_folder, to_json, with_wall_time, write_folder
    from sim.output_table import Style, render, render_comparison
    from sim.run import Simulation, load_trace

    scenario = scenario_of(args)
    # Wrong names are found before a long trace is read, an unwritable folder before a long run.
    compared = _compared(scenario, args.compare, args.policy)
    simulations = {k: Simulation(s) for k, s in compared.items()}
    folder = prepare_folder(args.out) if args.out is not None else None
    trace = load_trace(scenario)
    documents: dict[str, dict[str, Any]] = {}
    for name in list(simulations):
        result = _serve(simulations.pop(name), trace, name, args.quiet)
        if folder is not None:
            write_folder(result, prepare_folder(folder / _file_name(name)) if name else folder)
        documents[name] = with_wall_time(result)
    style = Style(colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    if not args.compare:
        document = documents[""]
        _print(to_json(document) if args.json else render(document, scenario, style))
    elif args.json:
        _print(to_json({"compare": documents}))
    else:
        _print(render_comparison(documents, scenario, style))


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The scenario of the flags: `--config` first, then flags, then `--set`, in order."""
    from sim.scenario import Scenario
    from sim.tree import read_yaml, set_path, set_text

    tree = read_yaml(args.config) if args.config is not None else {}
    if args.trace is not None and args.generate is not None:
        raise UserError("give --trace or --generate, not both")
    if args.trace is not None:
        set_path(tree, "trace", args.trace)
        tree.pop("generate", None)
    if args.generate is not None:
        set_path(tree, "generate", args.generate)
        tree.pop("trace", None)
    for flag, path in _FLAGS.items():
        value = getattr(args, flag)
        if value is not None:
            _need_trace(tree, path, flag)
            set_path(tree, path, value)
    if args.columns is not None:
        _need_trace(tree, "trace.columns", "columns")
        set_path(tree, "trace.columns", _pairs(args.columns, "--columns", "ROLE=COLUMN"))
    if args.skip_bad_rows:
        _need_trace(tree, "trace.skip_bad_rows", "skip-bad-rows")
        set_path(tree, "trace.skip_bad_rows", True)
    if args.slo is not None:
        for name, limit in _pairs(args.slo, "--slo", "ttft=SECONDS").items():
            set_path(tree, f"slo.{name.removesuffix('_s')}_s", limit)
    if args.wall_clock:
        if args.execute is None:
            raise UserError("--wall-clock is for --execute: a simulation has no real time")
        set_path(tree, "execute.wall_clock", True)
    if args.no_fast_forward:
        set_path(tree, "fast_forward", False)
    for setting in args.set:
        set_text(tree, setting)
    return Scenario.from_dict(tree)


_FLAGS = {
    "model": "model",
    "gpu": "gpu",
    "replicas": "cluster.replicas",
    "tp": "engine.tensor_parallel_size",
    "policy": "policy",
    "routing": "routing",
    "format": "trace.format",
    "arrivals": "trace.arrivals",
    "limit": "limit",
    "rate_scale": "rate_scale",
    "seed": "seed",
    "execute": "execute.device",
}


def _need_trace(tree: dict[str, Any], path: str, flag: str) -> None:
    if path.startswith("trace.") and tree.get("trace") is None:
        raise UserError(f"--{flag} is about a trace file: give one with --trace FILE")


def _pairs(text: str, flag: str, form: str) -> dict[str, str]:
    """`a=x,b=y` as a mapping."""
    pairs = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise UserError(f"{flag} {text or repr(text)}: write {flag} {form},...")
        if name.strip() in pairs:
            raise UserError(f"{flag} {text}: {name.strip()} is named twice")
        pairs[name.strip()] = value.strip()
    return pairs


def _compared(scenario: Scenario, names: str | None, policy: str | None) -> dict[str, Scenario]:
    """Label -> scenario: one per policy to compare, or just `scenario` under no label.

    The scenario's own policy keeps its options when it is among them; `policy`, the one asked for
    by flag, must be.
    """
    if names is None:
        return {"": scenario}
    from sim.registry import policy_class

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UserError("--compare needs policy names, as in --compare chunked,continuous,static")
    for name in wanted:
        policy_class("scheduling", name)  # all names are right before the first run starts
    labels = [_file_name(name) if ":" in name else normalise(name) for name in wanted]
    if len(set(labels)) < len(labels):
        raise UserError(f"--compare {names}: a policy is named twice")
    if policy is not None and policy not in wanted:
        raise UserError(f"--policy {policy} is not among --compare {names}; leave it out")
    own = scenario.policy
    return {
        name: scenario if name == own.name else scenario.with_({"policy": name}) for name in wanted
    }


def _serve(simulation: Simulation, trace: Trace, label: str, quiet: bool) -> Result:
    progress = _ProgressBar(label) if sys.stderr.isatty() and not quiet else None
    simulation.serve(trace, progress)
    simulation.run()
    result = simulation.result()
    if progress is not None:
        progress.clear()
    if not quiet:
        for note in result.system.notes:
            print(f"simulate: note: {note}", file=sys.stderr)
    if simulation.ended_early:
        print(f"simulate: ended early: {simulation.ended_early}", file=sys.stderr)
    return result


def _print(text: str) -> None:
    """To stdout at once. What its encoding lacks is written as escapes, which JSON reads too."""
    try:
        text.encode(sys.stdout.encoding, sys.stdout.errors or "strict")
    except UnicodeEncodeError:
        text = re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    try:
        print(text, flush=True)
    except OSError as error:
        # Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(f"cannot write to stdout: {error.strerror or error}") from None


class _ProgressBar:
    """Arrivals so far, on one line of stderr that goes away."""

    WIDTH = 30

    def __init__(self, label: str) -> None:
        self.label = f"{label} " if label else ""
        self.shown = -1

    def __call__(self, done: int, total: int) -> None:
        filled = self.WIDTH * done // max(total, 1)
        if filled != self.shown:
            self.shown = filled
            bar = "#" * filled + "." * (self.WIDTH - filled)
            line = f"\r{self.label}[{bar}] {done:,} of {total:,} requests"
            print(line, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in label)


def _fail(message: str) -> int:
    print(f"simulate: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _users_code(error: BaseException | None) -> str | None:
    """`file:line` of the deepest frame that is neither ours nor a library's: a user's policy.

    SimPy raises the errors of a process anew, with the original as their cause.
    """
    ours = Path(__file__).resolve().parent.parent
    packages = [ours / name for name in ("sim", "policies", "traces", "calibrate")]
    libraries = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "scripts")]
    while error is not None:
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            file = Path(frame.f_code.co_filename)
            if file.is_file() and not any(file.is_relative_to(p) for p in packages + libraries):
                return f"{file}:{line}"
        error = error.__cause__
    return None


if __name__ == "__main__":
    sys.exit(main())
