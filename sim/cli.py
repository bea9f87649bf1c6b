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
from typing import TYPE_CHECKING, Any

from sim.errors import UserError, normalise
from sim.flags import parse, scenario_of

if TYPE_CHECKING:
    from sim.output_table import Style
    from sim.request import Trace
    from sim.result import Result
    from sim.run import Simulation
    from sim.scenario import Scenario
    from sim.seeds import Replication


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `simulate` command; returns the exit status."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller (`>&-`)
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        _run(parse(argv))
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
    if args.list is not None:
        from sim.listing import listing

        _print(listing(args.list))
        return
    from sim.output import prepare_folder, to_json, with_wall_time, write_folder
    from sim.output_table import Style, render, render_comparison
    from sim.run import Simulation, load_trace

    scenario = scenario_of(args)
    # Wrong names are found before a long trace is read, an unwritable folder before a long run.
    compared = _compared(scenario, args.compare, args.policy)
    replications = _replications(compared, args.seeds)
    simulations = {k: Simulation(s) for k, s in compared.items()}
    folder = prepare_folder(args.out) if args.out is not None else None
    style = Style(colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    if replications:
        simulations.clear()
        _run_seeds(args, compared, replications, style)
        return
    trace = load_trace(scenario)
    told: set[str] = set()
    documents: dict[str, dict[str, Any]] = {}
    for name in list(simulations):
        result = _serve(simulations.pop(name), trace, name, args.quiet, told)
        if folder is not None:
            write_folder(result, prepare_folder(folder / _file_name(name)) if name else folder)
        documents[name] = with_wall_time(result)
    if not args.compare:
        document = documents[""]
        _print(to_json(document) if args.json else render(document, scenario, style))
    elif args.json:
        _print(to_json({"compare": documents}))
    else:
        _print(render_comparison(documents, scenario, style))


def _replications(compared: dict[str, Scenario], seeds: str | None) -> dict[str, Replication]:
    if seeds is None:
        return {}
    from sim.seeds import Replication

    return {name: Replication.of(scenario, seeds) for name, scenario in compared.items()}


def _run_seeds(
    args: argparse.Namespace,
    compared: dict[str, Scenario],
    replications: dict[str, Replication],
    style: Style,
) -> None:
    """`--seeds`: every scenario once per seed."""
    from sim.output import prepare_folder, to_json, with_wall_time, write_folder, write_seeds
    from sim.output_seeds import render_seeds
    from sim.run import Simulation, load_trace

    trace = load_trace(next(iter(compared.values())))
    told: set[str] = set()
    documents: dict[str, dict[str, Any]] = {}
    for name, scenario in compared.items():
        replication = replications[name]
        here = Path(args.out) / _file_name(name) if args.out is not None else None
        runs = []
        for seed in replication.to_run:
            one = scenario.with_({"seed": seed})
            requests = trace
            if replication.draws_requests and seed != replication.seeds[0]:
                requests = load_trace(one)
            label = f"{name} seed {seed}".strip()
            result = _serve(Simulation(one), requests, label, args.quiet, told)
            if here is not None:
                write_folder(result, prepare_folder(here / f"seed-{seed}"))
            runs.append(with_wall_time(result))
        documents[name] = replication.combine(runs)
        if here is not None:
            write_seeds(documents[name], here)
    if not args.json:
        _print(render_seeds(documents, next(iter(compared.values())), style))
    elif args.compare:
        _print(to_json({"compare": documents}))
    else:
        _print(to_json(documents[""]))


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


def _serve(simulation: Simulation, trace: Trace, label: str, quiet: bool, told: set[str]) -> Result:
    """Run it to its end. Notes that are not in `told` go to stderr, and into it."""
    progress = _ProgressBar(label) if sys.stderr.isatty() and not quiet else None
    simulation.serve(trace, progress)
    simulation.run()
    result = simulation.result()
    if progress is not None:
        progress.clear()
    for note in result.system.notes:
        if not quiet and note not in told:
            print(f"simulate: note: {note}", file=sys.stderr)
        told.add(note)
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
