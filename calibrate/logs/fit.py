"""Fit a server's scales and constants to the records of its runs.

Steps are compared one by one. Requests are compared one by one and by their means: the requests of
a run share its queues, so that they are worth far fewer independent values than there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from calibrate.logs.errors import Errors, Mask, errors
from calibrate.logs.parameters import Parameter, bounds, fit_at, kept, parameters
from calibrate.logs.records import LATENCIES, FloatArray, Records, Requests, Steps
from calibrate.logs.replay import Replay
from calibrate.logs.solve import Residuals, Solution, solve
from calibrate.logs.steps import KINDS, StepModel, kinds
from sim.cost.profile import Profile
from sim.cost.server import ServerFit
from sim.errors import UserError
from sim.system import System

STEPS_WORTH = 1000.0
STEP_FLOOR = 0.01
"""Error of single steps that no scale removes: bimodal kernels, a context known only as a sum."""
REQUESTS_WORTH = 50.0
REQUEST_FLOOR = 0.03
MEAN_FLOOR = 0.01
"""Of the mean latencies of a run: what repeating it would change."""
UNSERVED = math.log(4.0)
"""Residual of a request that was served in the log and is not in the simulation."""
MIN_FITTED = 10

Progress = Callable[[int], None]
"""Called with the number of simulations so far."""


@dataclass(frozen=True)
class Fitted:
    """What a fit found."""

    parameters: list[Parameter]
    solution: Solution
    fit: ServerFit
    before: Errors
    after: Errors
    num_fitted: int
    num_held_out: int
    simulations: int


def fit_logs(
    logs: Sequence[Records],
    system: System,
    base: Profile,
    masks: Sequence[Mask],
    *,
    keep: Sequence[str] = (),
    progress: Progress | None = None,
) -> Fitted:
    """Fit what the records with a true `masks` determine, and compare with all. `base` is the
    profile to start from; parameters named in `keep` stay as it has them. UserError for records
    that the server cannot have made, and when too few are left to fit."""
    num_fitted = sum(int(mask.sum()) for mask in masks)
    if num_fitted < MIN_FITTED:
        raise UserError(f"{num_fitted} records to fit are too few: hold out less, or record more")
    steps = [log for log in logs if isinstance(log, Steps)]
    found = parameters(system, base, client=not steps)

    def fit_of(theta: FloatArray) -> ServerFit:
        return fit_at(found, theta, base, system.scenario.cost.frontend)

    problem: _Problem
    if steps:
        problem = _Steps(steps, [StepModel(s, system, base) for s in steps], masks)
    else:
        runs = [log for log in logs if isinstance(log, Requests)]
        problem = _Requests(runs, [Replay(run, system, base) for run in runs], masks, progress)
    start = np.zeros(len(found))
    solution = solve(
        lambda theta: problem.residuals(fit_of(theta)),
        [p.name for p in found],
        np.array([p.spread for p in found]),
        bounds(found),
        np.array([p.step for p in found]),
        kept(found, keep),
        _slower_hosts(found),
    )
    return Fitted(
        found,
        solution,
        fit_of(solution.theta),
        problem.errors(fit_of(start)),
        problem.errors(fit_of(solution.theta)),
        num_fitted,
        sum(map(len, logs)) - num_fitted,
        problem.simulations,
    )


def _slower_hosts(found: Sequence[Parameter]) -> list[FloatArray]:
    """Where else to begin: hosts that are 2 to 16 times as slow. The shipped one may hide
    behind the device in every step; then nothing says which way to go."""
    host = np.array([float(p.field in ("sync_us", "async_us")) for p in found])
    return [host * math.log(factor) for factor in (2.0, 4.0, 8.0, 16.0)] if host.any() else []


class _Problem(Protocol):
    simulations: int

    def residuals(self, fit: ServerFit) -> Residuals: ...

    def errors(self, fit: ServerFit) -> Errors: ...


class _Steps:
    """All logs of steps. Each kind of step is a group: it has an error of its own."""

    simulations = 0

    def __init__(
        self, logs: Sequence[Steps], models: Sequence[StepModel], masks: Sequence[Mask]
    ) -> None:
        self._logs, self._models, self._masks = logs, models, masks
        self._kinds = [kinds(log) for log in logs]
        self._group = np.concatenate([k[m] for k, m in zip(self._kinds, masks, strict=True)])

    def residuals(self, fit: ServerFit) -> Residuals:
        values = [
            np.log(model.duration_s(fit)[mask] / log.duration_s[mask])
            for model, log, mask in zip(self._models, self._logs, self._masks, strict=True)
        ]
        worth, floor = np.full(len(KINDS), STEPS_WORTH), np.full(len(KINDS), STEP_FLOOR)
        return Residuals(np.concatenate(values), self._group, worth, floor)

    def errors(self, fit: ServerFit) -> Errors:
        predicted = [model.duration_s(fit) for model in self._models]
        table = {"all steps": list(zip(predicted, [g.duration_s for g in self._logs], strict=True))}
        for number, kind in enumerate(KINDS):
            table[f"{kind} steps"] = [
                (p, np.where(k == number, log.duration_s, np.nan))  # others are not compared
                for p, log, k in zip(predicted, self._logs, self._kinds, strict=True)
            ]
        return errors(table, self._masks)


class _Requests:
    """All runs of requests. For each latency of each run a group of single requests, and one of
    its mean alone."""

    def __init__(
        self,
        runs: Sequence[Requests],
        replays: Sequence[Replay],
        masks: Sequence[Mask],
        progress: Progress | None,
    ) -> None:
        self._runs, self._replays, self._masks = runs, replays, masks
        self._progress = progress
        self._memory: dict[str, list[dict[str, FloatArray]]] = {}
        self._compared: list[dict[str, Mask]] = []
        """Of each run: the requests compared, by latency; those that the first simulation served,
        so that all residuals are of the same ones."""
        self.simulations = 0

    def residuals(self, fit: ServerFit) -> Residuals:
        simulated = self._simulated(fit)
        if not self._compared:
            self._compared = self._comparable(simulated)
        values: list[FloatArray] = []
        group: list[FloatArray] = []
        worth: list[float] = []
        floor: list[float] = []
        basis: dict[int, FloatArray] = {}

        def add(some: FloatArray, independent: float, least: float) -> None:
            values.append(some)
            group.append(np.full(len(some), len(worth)))
            worth.append(independent)
            floor.append(least)

        for run, latencies, compared in zip(self._runs, simulated, self._compared, strict=True):
            for name, rows in compared.items():
                was, would = run.latency(name)[rows], latencies[name][rows]
                served = np.isfinite(would)
                single = np.full(len(was), UNSERVED)
                single[served] = np.log(would[served] / was[served])
                basis[len(worth)] = _features(run, rows)
                add(single, REQUESTS_WORTH, REQUEST_FLOOR)
                mean = UNSERVED
                if served.any():
                    # Of the same requests: those left out count as `UNSERVED` above.
                    mean = math.log(float(would[served].mean()) / float(was[served].mean()))
                add(np.array([mean]), 1.0, MEAN_FLOOR)
        return Residuals(
            np.concatenate(values),
            np.concatenate(group).astype(np.int64),
            np.array(worth),
            np.array(floor),
            basis,
        )

    def errors(self, fit: ServerFit) -> Errors:
        simulated = self._simulated(fit)
        table = {
            name.upper(): [
                (latencies[name], run.latency(name))
                for latencies, run in zip(simulated, self._runs, strict=True)
            ]
            for name in LATENCIES
        }
        return errors(table, self._masks)

    def _comparable(self, simulated: Sequence[dict[str, FloatArray]]) -> list[dict[str, Mask]]:
        found = []
        for run, latencies, mask in zip(self._runs, simulated, self._masks, strict=True):
            rows = {
                name: mask & (run.latency(name) > 0) & np.isfinite(latencies[name])
                for name in LATENCIES
            }
            found.append({name: r for name, r in rows.items() if r.any()})
        if not any(found):
            raise UserError("no recorded latency can be compared with a simulated one")
        return found

    def _simulated(self, fit: ServerFit) -> list[dict[str, FloatArray]]:
        """Latencies of every run; the fit comes back to where it was, so they are remembered."""
        key = repr(fit)
        if key not in self._memory:
            self._memory[key] = [self._replay(replay, fit) for replay in self._replays]
        return self._memory[key]

    def _replay(self, replay: Replay, fit: ServerFit) -> dict[str, FloatArray]:
        found = replay.latencies(fit)
        self.simulations += 1
        if self._progress is not None:
            self._progress(self.simulations)
        return found


def _features(run: Requests, rows: Mask) -> FloatArray:
    """What the latency of a request may depend on smoothly: when in the run it was sent, its
    lengths, how many others were under way. Orthonormal columns over `rows`."""
    position = np.linspace(-1.0, 1.0, len(run))
    prompt, output = np.log(run.prompt_tokens), np.log(run.output_tokens)
    sent_before = np.arange(len(run))
    left = np.sort(run.sent_s + np.nan_to_num(run.e2e_s, nan=0.0))
    under_way = np.log1p(sent_before - np.searchsorted(left, run.sent_s, side="right"))
    columns = [np.ones(len(run)), position, prompt, output, under_way, position**2]
    table = np.stack(columns, axis=1)[rows]
    # In this order: what is common to all requests first. What adds nothing new is left out.
    vectors, sizes = np.linalg.qr(table)
    found: FloatArray = vectors[:, np.abs(np.diag(sizes)) > 1e-6 * len(table) ** 0.5]
    return found
