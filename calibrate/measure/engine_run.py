"""Calibrating the real engine as a whole: traffic, operator times, and a fit with its errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from calibrate.engine.clock import work_clock
from calibrate.engine.executor import MeasuredStep, RealExecutor
from calibrate.engine.runner import ModelRunner
from calibrate.measure.probe import Probe, slowness
from calibrate.measure.recorder import recorder_for
from calibrate.measure.step_fit import OperatorError, fit_steps, operator_errors, shapes_of
from calibrate.measure.traffic import FEWEST_STEPS, Mix, run_traffic, warm_up
from sim.cost.interface import StepShape
from sim.cost.measured import StepFit
from sim.engine.config import EngineConfig
from sim.errors import UserError

FloatArray = npt.NDArray[np.float64]
BLOCK = 25
"""Consecutive steps that are held out, or not, together: neighbours are alike."""
RIDGE = 3e-4
"""Variance of the logarithm of the probe, that of a drift by 2 %, at which half of its effect is
believed: with hardly any drift to learn from, assume hardly any effect."""
ROUNDS = 4
"""Of fitting the steps' cost and the machine's drift in turns."""
MOST_SENSITIVE = 1.5
"""A step is never taken to depend on the machine's state by a higher power of the probe."""


@dataclass(frozen=True)
class MachineState:
    """What the probe said while calibrating, and how much it matters."""

    probe_ns: float
    """Its time then: the reference."""
    sensitivity: float
    """A machine on which the probe takes r times as long takes r^sensitivity times as long for a
    step that only decodes."""
    chunk_sensitivity: float
    """The same for steps with a prefill chunk, which depend less on memory."""
    probe_spread: float

    def slowness(self, steps: Sequence[MeasuredStep]) -> FloatArray:
        """How many times slower than at calibration the probe was after each step, smoothed."""
        if not self.probe_ns or not all(s.probe_ns for s in steps):
            return np.ones(len(steps))
        return slowness([s.probe_ns for s in steps], self.probe_ns)

    def stretch(self, slow: float, shape: StepShape) -> float:
        """How many times longer a step lasts where the probe is `slow` times slower."""
        return float(slow ** (self.chunk_sensitivity if shape.prefills else self.sensitivity))

    def speed(self, steps: Sequence[MeasuredStep]) -> FloatArray:
        """How many times slower than at calibration the machine was in each step."""
        slow = self.slowness(steps).tolist()
        return np.array([self.stretch(r, s.shape) for r, s in zip(slow, steps, strict=True)])


@dataclass(frozen=True)
class EngineCalibration:
    fit: StepFit
    machine: MachineState
    errors: dict[str, OperatorError]
    """On steps that were held out from a fit of the others."""
    steps: int
    interrupted: float
    """Part of the wall time in which the engine's thread did not have the core."""


def levels_for(config: EngineConfig) -> list[int]:
    """Concurrencies to visit, up to what the engine runs at a time: closer where few requests
    run, which is most of the time; what lies between is met on the way down."""
    levels = [1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 192, 256]
    return [n for n in levels if n <= config.max_num_seqs]


def make_executor(runner: ModelRunner, config: EngineConfig) -> RealExecutor:
    """An executor that records operators and asks the probe after every step."""
    device = runner.decoder.weights.device
    recorder = recorder_for(device, work_clock(device))
    return RealExecutor(runner, config, recorder=recorder, probe=Probe(device).ns)


def calibrate_engine(
    runner: ModelRunner,
    config: EngineConfig,
    mix: Mix,
    budget_s: float,
    *,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> EngineCalibration:
    """Run traffic for `budget_s` seconds, or longer where that is too short for `FEWEST_STEPS`, and
    fit the cost of a step. UserError when there were fewer even so."""
    executor = make_executor(runner, config)
    begin = time.monotonic()
    if runner.decoder.weights.device.type == "cuda":
        warm_up(executor, config)
    # Compiling kernels counts, but some time must be left to measure.
    budget_s = max(budget_s - (time.monotonic() - begin), 0.3 * budget_s)
    steps = run_traffic(
        executor,
        config,
        mix,
        levels=levels_for(config),
        budget_s=budget_s,
        seed=seed,
        progress=progress,
    )
    return calibration_of(steps)


def calibration_of(steps: Sequence[MeasuredStep]) -> EngineCalibration:
    """Fit measured steps, with the machine's drift taken out, and check on held-out ones."""
    if len(steps) < FEWEST_STEPS:
        raise UserError(
            f"the calibration's budget was enough for {len(steps)} steps only, and {FEWEST_STEPS} "
            f"are needed: give it more time, or a smaller model"
        )
    machine = machine_state(steps)
    speed = machine.speed(steps)
    held = np.arange(len(steps)) // BLOCK % 4 == 3
    if held.sum() < 10 or (~held).sum() < 20:
        held = np.arange(len(steps)) % 4 == 3
    kept = [s for s, h in zip(steps, held, strict=True) if not h]
    checked = [s for s, h in zip(steps, held, strict=True) if h]
    partial = fit_steps(kept, speed[~held])
    wall = sum(s.wall_ns for s in steps)
    return EngineCalibration(
        fit=fit_steps(steps, speed),
        machine=machine,
        errors=operator_errors(partial, checked, speed[held]),
        steps=len(steps),
        interrupted=max(0.0, 1 - sum(s.ns for s in steps) / wall),
    )


def machine_state(steps: Sequence[MeasuredStep]) -> MachineState:
    """How the times of the steps follow the probe, beside what their shapes explain."""
    probes = np.array([s.probe_ns for s in steps], dtype=np.float64)
    if not probes.all():
        return MachineState(0.0, 0.0, 0.0, 0.0)
    reference = float(np.median(probes))
    low, high = np.percentile(probes, [16, 84])
    machine = MachineState(reference, 0.0, 0.0, float((high - low) / 2 / reference))
    slow = np.log(machine.slowness(steps))
    chunked = np.array([bool(s.shape.prefills) for s in steps])
    us = np.array([s.ns / 1e3 for s in steps])
    # The fit without drift takes some of it for cost where a size was met in one state of the
    # machine only: in turns, both settle.
    for _ in range(ROUNDS):
        fit = fit_steps(steps, machine.speed(steps))
        residual = np.log(us / np.sum(list(fit.operators_us(shapes_of(steps)).values()), axis=0))
        machine = replace(
            machine,
            sensitivity=_slope(slow[~chunked], residual[~chunked]),
            chunk_sensitivity=_slope(slow[chunked], residual[chunked]),
        )
    return machine


def _slope(slow: FloatArray, residual: FloatArray) -> float:
    if len(slow) < 10:
        return 0.0
    # Outliers of single steps are no drift.
    residual = np.clip(residual, *np.percentile(residual, [2, 98]))
    together = float(np.mean((slow - slow.mean()) * (residual - residual.mean())))
    return min(max(together / (float(np.var(slow)) + RIDGE), 0.0), MOST_SENSITIVE)
