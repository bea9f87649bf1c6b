"""Calibrate, execute, simulate, compare: does the twin of the real engine behave like it?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from calibrate.engine.closed_loop import Modelled, Scripted, Served, VirtualTime, serve
from calibrate.engine.executor import MeasuredStep, RealExecutor
from calibrate.measure.engine_run import EngineCalibration, MachineState
from calibrate.measure.step_fit import OperatorError, operator_errors, shapes_of
from sim.cost.interface import StepShape
from sim.cost.measured import MeasuredCost, StepFit
from sim.engine.config import EngineConfig
from sim.engine.interface import RequestRecord, Status
from sim.request import Request, Trace

FloatArray = npt.NDArray[np.float64]
KINDS = ("decode", "prefill", "mixed")


@dataclass(frozen=True)
class KindError:
    """Errors of whole steps of one kind, normalised."""

    steps: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True)
class LatencyError:
    """Relative errors of the simulation against the execution; positive is too slow."""

    step_median: float
    """Median over steps of the absolute error."""
    tpot_mean: float
    ttft_mean: float
    e2e_mean: float


@dataclass(frozen=True)
class Noise:
    """The machine itself, while the trace was executed."""

    step: float
    """Spread of neighbouring steps of equal shape but for their context, relative."""
    probe: float
    """Spread of the probe (half its middle 68 %), relative."""
    drift: float
    """Median slowness against the calibration, as applied to steps: 1 is none."""
    interrupted: float
    """Part of the wall time in which something else had the core."""


@dataclass(frozen=True)
class Comparison:
    """One closed loop."""

    decisions_equal: bool
    """The modelled engine, given the measured durations, makes the same decisions and gives every
    request the same times."""
    raw: LatencyError
    normalised: LatencyError | None
    """With the machine's drift, as its probe saw it, put into the simulation; None without."""
    kinds: dict[str, KindError]
    operators: dict[str, OperatorError]
    noise: Noise
    executed: dict[str, float]
    """Mean TTFT, TPOT, E2E in seconds, and counts."""
    simulated: dict[str, float]
    failure: str


def scaled_requests(trace: Trace, factor: float) -> list[Request]:
    """The requests of a trace that comes `factor` times as fast."""
    return [replace(r, arrival_ns=round(r.arrival_ns / factor)) for r in trace]


def work_s(requests: Sequence[Request], cost: MeasuredCost, config: EngineConfig) -> float:
    """Rough engine time for all requests: prompts in whole budgets, decodes eight at a time."""
    batch, total = min(8, config.max_num_seqs), 0
    for r in requests:
        left, done = min(r.prompt_tokens, config.max_model_len), 0
        while left > 0:
            q = min(left, config.token_budget)
            total += cost.step_ns(StepShape(0, 0, 0, [(q, done)], int(q == left)))
            left, done = left - q, done + q
        context = r.prompt_tokens + r.output_tokens // 2
        step = cost.step_ns(StepShape(batch, batch * context, batch * context**2, [], batch))
        total += (r.output_tokens - 1) * step // batch
    return total / 1e9


def compare(
    requests: Sequence[Request],
    config: EngineConfig,
    executor: RealExecutor,
    calibration: EngineCalibration | tuple[StepFit, MachineState],
    cost: MeasuredCost,
    *,
    time: VirtualTime | None = None,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Execute the requests on the real engine, simulate them, and compare."""
    fit, machine = (
        calibration if isinstance(calibration, tuple) else (calibration.fit, calibration.machine)
    )
    executor.steps.clear()
    real = serve(requests, config, cost, executor, time, progress)
    steps = list(executor.steps)
    replayed = serve(requests, config, cost, Scripted([s.ns for s in steps]))
    plain = _simulate(requests, config, cost, None)
    speed = machine.speed(steps)
    normalised = None
    if machine.probe_ns and steps and steps[0].probe_ns:
        starts = real.log.table()["start_ns"]
        slow = machine.slowness(steps)
        drifting = _simulate(
            requests, config, cost,
            lambda now, shape: machine.stretch(float(np.interp(now, starts, slow)), shape),
        )  # fmt: skip
        normalised = _errors(real, drifting, fit, steps, speed)
    return Comparison(
        decisions_equal=_same(real, replayed),
        raw=_errors(real, plain, fit, steps, np.ones(len(steps))),
        normalised=normalised,
        kinds=_kind_errors(fit, steps, speed),
        operators=operator_errors(fit, steps, speed),
        noise=_noise(steps, speed),
        executed=latencies(real),
        simulated=latencies(plain),
        failure=real.failure,
    )


def _simulate(
    requests: Sequence[Request],
    config: EngineConfig,
    cost: MeasuredCost,
    slowness: Callable[[int, StepShape], float] | None,
) -> Served:
    time = VirtualTime()
    return serve(requests, config, cost, Modelled(cost, time, slowness), time)


def _same(real: Served, replayed: Served) -> bool:
    """Equal decisions, and equal records of the requests that left."""
    steps = len(real.decisions) if not real.failure else len(real.decisions) - 1
    if replayed.decisions[:steps] != real.decisions[:steps]:
        return False
    left = [r for r in real.records if r.status is not Status.UNFINISHED]
    again = {r.request.uid: r for r in replayed.records}
    return all(again.get(r.request.uid) == r for r in left)


def latencies(served: Served) -> dict[str, float]:
    """Mean seconds over completed requests, and what else happened."""
    done = [r for r in served.records if r.status is Status.COMPLETED]
    more = [r for r in done if r.output_tokens > 1]
    return {
        "ttft_s": _mean([r.first_token_ns - r.request.arrival_ns for r in done]),
        "tpot_s": _mean([_tpot(r) for r in more]),
        "e2e_s": _mean([r.finish_ns - r.request.arrival_ns for r in done]),
        "requests": len(served.records),
        "completed": len(done),
        "steps": len(served.decisions),
        "preemptions": sum(r.preemptions for r in served.records),
        "cached_tokens": sum(r.cached_tokens for r in served.records),
    }


def _tpot(r: RequestRecord) -> float:
    return (r.finish_ns - r.first_token_ns) / (r.output_tokens - 1)


def _mean(ns: Sequence[float]) -> float:
    return float(np.mean(ns)) / 1e9 if ns else 0.0


def _errors(
    real: Served, simulated: Served, fit: StepFit, steps: Sequence[MeasuredStep], speed: FloatArray
) -> LatencyError:
    was, would_be = latencies(real), latencies(simulated)

    def relative(name: str) -> float:
        return would_be[name] / was[name] - 1 if was[name] else 0.0

    error = np.abs(_step_errors(fit, steps, speed))
    return LatencyError(
        step_median=float(np.median(error)) if len(error) else 0.0,
        tpot_mean=relative("tpot_s"),
        ttft_mean=relative("ttft_s"),
        e2e_mean=relative("e2e_s"),
    )


def _step_errors(fit: StepFit, steps: Sequence[MeasuredStep], speed: FloatArray) -> FloatArray:
    if not steps:
        return np.zeros(0)
    predicted = np.sum(list(fit.operators_us(shapes_of(steps)).values()), axis=0) * speed
    result: FloatArray = predicted / np.array([s.ns / 1e3 for s in steps]) - 1
    return result


def _kind(step: MeasuredStep) -> str:
    if not step.shape.prefills:
        return "decode"
    return "mixed" if step.shape.num_decodes else "prefill"


def _kind_errors(
    fit: StepFit, steps: Sequence[MeasuredStep], speed: FloatArray
) -> dict[str, KindError]:
    error = _step_errors(fit, steps, speed)
    kinds = np.array([_kind(s) for s in steps])
    real = np.array([s.ns for s in steps], dtype=np.float64)
    found = {}
    for kind in KINDS:
        rows = kinds == kind
        if rows.any():
            size = np.abs(error[rows])
            found[kind] = KindError(
                steps=int(rows.sum()),
                median=float(np.median(size)),
                p90=float(np.quantile(size, 0.9)),
                bias=float((error[rows] * real[rows]).sum() / real[rows].sum()),
            )
    return found


def _noise(steps: Sequence[MeasuredStep], speed: FloatArray) -> Noise:
    ratios = [
        abs(np.log(b.ns / a.ns))
        for a, b in pairwise(steps)
        if not a.shape.prefills
        and not b.shape.prefills
        and a.shape.num_decodes == b.shape.num_decodes
    ]
    # The median of |difference of two| is 0.6745 sqrt(2) standard deviations.
    spread = float(np.median(ratios)) / (0.6745 * 2**0.5) if ratios else 0.0
    probes = np.array([s.probe_ns for s in steps if s.probe_ns], dtype=np.float64)
    probe = 0.0
    if len(probes):
        low, high = np.percentile(probes, [16, 84])
        probe = float((high - low) / 2 / np.median(probes))
    wall = sum(s.wall_ns for s in steps)
    return Noise(
        step=spread,
        probe=probe,
        drift=float(np.median(speed)) if len(speed) else 1.0,
        interrupted=max(0.0, 1 - sum(s.ns for s in steps) / wall) if wall else 0.0,
    )
