"""The work of `validate engine`: everything that needs torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

import traces
from calibrate.engine.architecture import architecture
from calibrate.engine.closed_loop import VirtualTime
from calibrate.engine.device import pick_device
from calibrate.engine.executor import WallClock
from calibrate.engine.llm import load_weights_of, make_runner
from calibrate.engine.memory import fill_blocks
from calibrate.engine.runner import ModelRunner
from calibrate.engine.settings import engine_config
from calibrate.engine.threads import one_thread
from calibrate.engine.tokens import TraceTokens
from calibrate.measure.budget import Show, progress_bar, seconds
from calibrate.measure.engine_profile import entry_of, make_profile, read_engine
from calibrate.measure.engine_run import MachineState, calibrate_engine, make_executor
from calibrate.measure.machine import describe_machine
from calibrate.measure.traffic import Mix, warm_up
from calibrate.validation.closed_loop import Comparison, compare, scaled_requests, work_s
from sim.cost.measured import MeasuredCost, StepFit
from sim.cost.profile import load as load_profile
from sim.cost.profile import save
from sim.engine.config import EngineConfig
from sim.errors import UserError
from sim.request import Request, Trace


@dataclass(frozen=True)
class Loops:
    """All closed loops of one command."""

    device: dict[str, Any]
    model: str
    trace: dict[str, Any]
    calibration: dict[str, Any]
    clock: str
    comparisons: Sequence[Comparison]

    @property
    def median(self) -> Comparison:
        """The loop whose step error is in the middle."""
        ordered = sorted(self.comparisons, key=lambda c: (c.normalised or c.raw).step_median)
        return ordered[len(ordered) // 2]

    def errors(self, which: str) -> dict[str, float] | None:
        """Median over the loops of the size of each error; with `_signed` its median with sign."""
        rows = [getattr(c, which) for c in self.comparisons]
        if any(row is None for row in rows):
            return None
        found: dict[str, float] = {}
        for name in vars(rows[0]):
            values = np.array([getattr(row, name) for row in rows])
            found[name] = float(np.median(np.abs(values)))
            if name != "step_median":
                found[f"{name}_signed"] = float(np.median(values))
        return found


def run_loops(args: argparse.Namespace) -> Loops:
    device = pick_device(args.device)
    arch = architecture(args.model)
    config = engine_config(arch, device.type, engine_settings(args.set))
    if config.speculative:
        raise UserError(
            "validate engine compares steps without speculation; use simulate --execute for it"
        )
    budget_s = seconds(args.budget)
    machine_meta = describe_machine(device)
    given = None
    if args.profile is not None:
        given = read_engine(load_profile(args.profile), arch.shape, machine_meta["device"])
    trace = _trace(args)
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise UserError(f"{args.out}: its folder does not exist")
    with one_thread(device), progress_bar() as show:
        show("loading", 0.0)
        arch, weights = load_weights_of(
            args.model, arch, device=device, dtype=args.dtype, seed=args.seed
        )
        config = fill_blocks(config, arch.shape.kv_bytes_per_token(), device)
        runner = make_runner(arch, weights, config, TraceTokens(arch.shape.vocab, args.seed))
        comparisons = []
        for index in range(args.runs):
            if args.profile is None:
                calibration = calibrate_engine(
                    runner, config, mix_of(trace), budget_s, seed=args.seed + index,
                    progress=lambda done: show("calibrating", done),
                )  # fmt: skip
                given = (calibration.fit, calibration.machine)
                entry = entry_of(calibration, arch.shape, args.dtype, machine_meta)
                if args.out is not None:
                    save(make_profile(machine_meta, [entry]), args.out)
                about = {
                    "steps": calibration.steps,
                    "sensitivity": calibration.machine.sensitivity,
                    "chunk_sensitivity": calibration.machine.chunk_sensitivity,
                    "errors": {k: vars(v) for k, v in calibration.errors.items()},
                }
            else:
                about = {"profile": str(args.profile)}
            if given is None:
                raise UserError("no calibration")
            comparison, factor = _loop(args, trace, config, runner, given, show)
            comparisons.append(comparison)
    return Loops(
        device=machine_meta,
        model=arch.shape.name,
        trace={"name": trace.name, "requests": len(trace), "rate_scale": factor},
        calibration=about,
        clock="wall" if args.wall_clock else "virtual",
        comparisons=comparisons,
    )


def _loop(
    args: argparse.Namespace,
    trace: Trace,
    config: EngineConfig,
    runner: ModelRunner,
    given: tuple[StepFit, MachineState],
    show: Show,
) -> tuple[Comparison, float]:
    """One execution and its simulations; and how much faster than the trace requests came."""
    cost = MeasuredCost(given[0], {})
    requests = list(trace)
    factor = args.rate_scale or _factor(requests, cost, config, args.load)
    executor = make_executor(runner, config)
    if runner.decoder.weights.device.type == "cuda":
        warm_up(executor, config)
    time = VirtualTime()
    if args.wall_clock:
        # A probe between steps would take real time from the requests.
        executor.clock, executor.probe = WallClock(lambda: time.now_ns), None
    comparison = compare(
        scaled_requests(trace, factor),
        config,
        executor,
        given,
        cost,
        time=time,
        progress=lambda done: show("executing", done / len(requests)),
    )
    return comparison, factor


def _factor(
    requests: Sequence[Request], cost: MeasuredCost, config: EngineConfig, load: float
) -> float:
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9
    if span_s <= 0:
        return 1.0
    return load * span_s / work_s(requests, cost, config)


def _trace(args: argparse.Namespace) -> Trace:
    if args.trace is not None:
        trace = traces.load(args.trace, limit=args.limit)
    else:
        lengths = "prompt=lognormal(150,500),output=lognormal(20,60)"
        trace = traces.generate(f"poisson:rate=1,n={args.limit},{lengths}", args.seed)
    if len(trace) == 0:
        raise UserError(f"{trace.name}: no requests to execute")
    return trace


def mix_of(trace: Trace) -> Mix:
    """Traffic with lengths like the trace's, to calibrate on."""

    def ends(column: Any) -> tuple[float, float, int]:
        median, p90 = np.quantile(column, [0.5, 0.9])
        return max(1.0, float(median)), max(1.1 * float(median), 2.0, float(p90)), int(column.max())

    prompt, output = ends(trace.prompt_tokens), ends(trace.output_tokens)
    return Mix(*prompt, *output)


def engine_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """`engine.NAME=VALUE` texts as settings."""
    found: dict[str, Any] = {}
    for text in assignments:
        path, equals, value = text.partition("=")
        section, dot, name = path.strip().partition(".")
        if not equals or not dot or section != "engine":
            raise UserError(f"--set takes engine.NAME=VALUE, got {text!r}")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: the value is not valid YAML") from error
    return found
