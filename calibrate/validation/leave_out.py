"""How well are models predicted that the engine's constants were not fitted on?

A few constants of the cost model cannot be measured by timing kernels: what sorting for top-p
costs, what a collective waits for the slowest rank, how much faster decode attention runs in a
model than alone. They are refitted here without one model's runs, and that model is predicted.

A step lasts T = T0 + X c with constants c, so leaving a model out is a linear least-squares fit
over the stages of the others. T0 comes from the cost model at the batch that Little's law gives,
B = rate (N - 1) T, which stands for the simulation here: no queueing, equal contexts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calibrate.validation.deployment import Deployment, deployment
from calibrate.validation.errors import STABLE
from calibrate.validation.experiments import Experiment, SharedPrefixLoad
from calibrate.validation.measured import measured_values
from calibrate.validation.workloads import RETOKENISED
from sim.cost.interface import StepShape
from sim.cost.step import StepCost
from sim.cost.tables import TOP_P_US_PER_ENTRY, TOP_P_US_PER_LOGIT

Array = npt.NDArray[np.float64]

CONSTANTS = (
    "sorting for top-p, fraction",
    "wait for the slowest rank, ms per 1,000 collectives and doubling of ranks",
    "decode attention (FlashAttention-3), fraction",
)
"""Corrections to the built-in values; all zero where those are right."""
ODD = ("s2r-22-",)
"""Left out of every fit (not of the predictions): 12 % slower than its near-replicates, for no
reason that its entry shows (a slow node?)."""
HIT_TOKENS = 8
"""Mean length of the chunk that a fully cached prompt still computes: what its last block lacks."""


@dataclass(frozen=True)
class StagePoint:
    """One measured stage: its TPOT, and what the model says of its mean step."""

    experiment: str
    model: str
    requests: int
    measured_ms: float
    base_ms: float
    features: Array


@dataclass(frozen=True)
class LeftOut:
    """TPOT error of one run, per cent: with the built-in constants, and with those refitted on the
    other models."""

    experiment: str
    model: str
    built_in: float
    refitted: float


def points(experiments: Iterable[Experiment], others: Sequence[Experiment]) -> list[StagePoint]:
    """The stages of all measured stable and near-capacity runs of the shared-prefix client."""
    found: list[StagePoint] = []
    for experiment in experiments:
        work = experiment.workload
        if not isinstance(work, SharedPrefixLoad) or experiment.regime not in STABLE:
            continue
        server, measured = deployment(experiment, others), measured_values(experiment)
        cost = server.step_cost()
        for number, stage in enumerate(work.stages):
            tpot = measured.get((number, "tpot_mean"))
            if tpot is None:
                continue
            rate = stage.num_requests / stage.duration_s
            base, batch, mixed = _mean_step(cost, work, rate)
            features = _features(server, cost, work, batch, mixed)
            found.append(
                StagePoint(
                    experiment.id, server.model.name, stage.num_requests, tpot, base, features
                )
            )
    return found


def _mean_step(cost: StepCost, work: SharedPrefixLoad, rate: float) -> tuple[float, float, float]:
    """Milliseconds of the mean step, its batch, and the share of steps that hold a chunk."""
    most = cost.tables.engine.max_num_seqs
    step, batch, mixed = 10.0, 1.0, 0.0
    for _ in range(30):
        batch = min(max(rate * (work.output_tokens - 1) * step / 1e3, 1.0), most - 1.0)
        mixed = 1.0 - np.exp(-rate * step / 1e3)
        low = int(batch)
        at = [_step_ms(cost, work, n, mixed) for n in (low, low + 1)]
        step = 0.5 * step + 0.5 * (at[0] + (at[1] - at[0]) * (batch - low))
    return step, batch, mixed


def _step_ms(cost: StepCost, work: SharedPrefixLoad, batch: int, mixed: float) -> float:
    prompt, context, square = _contexts(work)
    plain = StepShape(batch, batch * context, batch * square, (), batch)
    chunk = [(HIT_TOKENS, prompt - HIT_TOKENS)]
    both = StepShape(batch, batch * context, batch * square, chunk, batch + 1)
    return (cost.step_ns(plain) * (1 - mixed) + cost.step_ns(both) * mixed) * 1e-6


def _contexts(work: SharedPrefixLoad) -> tuple[int, int, int]:
    """Prompt tokens, mean context of a decode, and its mean square."""
    asked = RETOKENISED * (work.system_tokens + work.question_tokens)
    prompt = work.lengths.mean if work.lengths else asked
    context = prompt + work.output_tokens / 2
    return int(prompt), int(context), int(context**2 + work.output_tokens**2 / 12)


def _features(
    server: Deployment, cost: StepCost, work: SharedPrefixLoad, batch: float, mixed: float
) -> Array:
    """Milliseconds of a step per unit of each of `CONSTANTS`."""
    rank = cost.tables.rank
    sort = (TOP_P_US_PER_ENTRY + TOP_P_US_PER_LOGIT * batch) * rank.model.vocab * 1e-3
    collectives = (2 * rank.stage_layers + 1) / 1e3 if rank.tp > 1 else 0.0
    doublings = np.log2(rank.tp / 2) if rank.tp > 1 else 0.0
    _, context, _ = _contexts(work)
    count = max(int(batch), 1)
    attention = 0.0
    if server.gpu.attention == "fa3":
        lines = cost.tables.attention.decodes(count)
        attention = float(np.interp(count * context, lines.work.knots, lines.work.values)) * 1e-6
    return np.array([sort * rank.model.top_p, collectives * doublings, attention])


def leave_one_model_out(stages: Sequence[StagePoint]) -> list[LeftOut]:
    """Every run, predicted with constants fitted on the runs of all other models."""
    found = []
    for model in sorted({s.model for s in stages}):
        fit = _fit([s for s in stages if s.model != model and not s.experiment.startswith(ODD)])
        mine = [s for s in stages if s.model == model]
        for run in dict.fromkeys(s.experiment for s in mine):
            of_run = [s for s in mine if s.experiment == run]
            weights = np.array([s.requests for s in of_run], dtype=np.float64)
            measured = np.average([s.measured_ms for s in of_run], weights=weights)
            plain = np.average([s.base_ms for s in of_run], weights=weights)
            moved = np.average([s.base_ms + s.features @ fit for s in of_run], weights=weights)
            found.append(
                LeftOut(run, model, 100 * (plain / measured - 1), 100 * (moved / measured - 1))
            )
    return found


def _fit(stages: Sequence[StagePoint]) -> Array:
    """Corrections to the constants that make the stages' relative errors least, in squares."""
    matrix = np.array([s.features / s.measured_ms for s in stages])
    target = np.array([1 - s.base_ms / s.measured_ms for s in stages])
    used = np.abs(matrix).sum(axis=0) > 0
    found = np.zeros(len(CONSTANTS))
    found[used] = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
    return found


def refitted(stages: Sequence[StagePoint]) -> dict[str, float]:
    """The corrections when no model is left out."""
    fit = _fit([s for s in stages if not s.experiment.startswith(ODD)])
    return dict(zip(CONSTANTS, fit.tolist(), strict=True))
