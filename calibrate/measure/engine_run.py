"""Calibrating the real engine as a whole: traffic, operator times, and a fit with its errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calibrate.engine.clock import work_clock
from calibrate.engine.executor import MeasuredStep, RealExecutor
from calibrate.engine.runner import ModelRunner
from calibrate.measure.probe import Probe, slowness
from calibrate.measure.recorder import recorder_for
from calibrate.measure.step_fit import OperatorError, fit_steps, operator_errors, shapes_of
from calibrate.measure.traffic import Mix, run_traffic, warm_up
from sim.cost.measured import StepFit
from sim.engine.config import EngineConfig
from sim.errors import UserError

FloatArray = npt.NDArray[np.float64]
BLOCK = 25
"""Consecutive steps that are held out, or not, together: neighbours are alike."""


@dataclass(frozen=True)
class MachineState:
    """What the probe said while calibrating, and how much it matters."""

    probe_ns: float
    """Its time then: the reference."""
    sensitivity: float
    """A machine on which the probe takes r times as long takes r^sensitivity times as long for a
    step: the probe is bound by memory more than a step is."""
    probe_spread: float

    def speed(self, steps: Sequence[MeasuredStep]) -> FloatArray:
        """How many times slower than at calibration the machine was in each step."""
        if not self.probe_ns or not all(s.probe_ns for s in steps):
            return np.ones(len(steps))
        smooth = slowness([s.probe_ns for s in steps], self.probe_ns)
        result: FloatArray = smooth**self.sensitivity
        return result


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
    """Concurrencies to visit: powers of two up to what the engine runs at a time."""
    levels = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
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
    """Run traffic for `budget_s` seconds and fit the cost of a step. UserError when the budget
    was too short for 40 steps."""
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
    if len(steps) < 40:
        raise UserError(
            f"the calibration's budget was enough for {len(steps)} steps only, and 40 are needed: "
            f"give it more time, or a smaller model"
        )
    machine = machine_state(steps, fit_steps(steps))
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


def machine_state(steps: Sequence[MeasuredStep], fit: StepFit) -> MachineState:
    """How the steps' residuals follow the probe."""
    probes = np.array([s.probe_ns for s in steps], dtype=np.float64)
    if not probes.all():
        return MachineState(0.0, 0.0, 0.0)
    reference = float(np.median(probes))
    low, high = np.percentile(probes, [16, 84])
    slow = np.log(slowness(probes, reference))
    predicted = np.sum(list(fit.operators_us(shapes_of(steps)).values()), axis=0)
    residual = np.log(np.array([s.ns / 1e3 for s in steps]) / predicted)
    # Outliers of single steps are no drift.
    residual = np.clip(residual, *np.percentile(residual, [2, 98]))
    variance = float(np.var(slow))
    # A ridge: with hardly any drift to learn from, assume hardly any effect.
    slope = float(np.mean((slow - slow.mean()) * (residual - residual.mean()))) / (variance + 1e-3)
    return MachineState(reference, min(max(slope, 0.0), 1.0), float((high - low) / 2 / reference))
