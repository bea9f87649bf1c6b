"""Robust, regularised least squares with few evaluations, and which parameters the data determine.

    minimise   sum_i weight_i rho(residual_i / sigma_i) + sum_j (theta_j / spread_j)^2

by Gauss-Newton steps with finite differences (Levenberg's damping when a step makes it worse), rho
as of Huber by reweighting. theta 0 is the prior. A parameter is determined when the data shrink its
spread by half or more; others are put back to 0 one at a time, the vaguest first, for what one
parameter does may be what another does too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from calibrate.logs.records import FloatArray

HUBER = 1.5
"""Residuals beyond so many sigmas count linearly."""
DETERMINED = 0.5
"""Largest ratio of the spread after the fit to that of the prior."""
CLEAR = 2.0
"""Standard deviations that a derivative must be away from 0 to count."""
ROUNDS = 8
TOLERANCE = 2e-3
"""Change of the parameters, in spreads of the prior, below which the fit has converged."""


@dataclass(frozen=True)
class Residuals:
    """Of one evaluation: logarithms of predicted over recorded, in groups that are alike."""

    values: FloatArray
    group: npt.NDArray[np.int64]
    """Of each value."""
    effective: FloatArray
    """Of each group: how many independent values it is worth at the most."""
    floor: FloatArray
    """Of each group: the least sigma, the error that the model has anyway."""
    basis: Mapping[int, FloatArray] = field(default_factory=dict)
    """For some groups, orthonormal columns [values, features]: derivatives are taken to be sums of
    these. In a simulation every single value jumps when a parameter moves, for a request comes into
    another step; taken as they are, such derivatives look like knowledge."""

    def weights(self, hopeful: bool = False) -> FloatArray:
        """Squared-error weight of every value: 1 / sigma^2, less for outliers, and less where a
        group has more values than it is worth. Sigma is the spread of the group, or at its floor
        when `hopeful`: what could be known if the model were as good as it can be."""
        weights = np.zeros(len(self.values))
        for g, (worth, floor) in enumerate(zip(self.effective, self.floor, strict=True)):
            here = self.group == g
            count = int(here.sum())
            if not count:
                continue
            # Around the median: an error that all share is what is to be fitted, not noise.
            size = np.abs(self.values[here] - np.median(self.values[here]))
            # 1.48 times the median is the standard deviation of a normal distribution.
            sigma = floor if hopeful else max(1.4826 * float(np.median(size)), floor)
            robust = np.minimum(1.0, HUBER * sigma / np.maximum(size, 1e-12))
            weights[here] = robust * min(1.0, worth / count) / sigma**2
        return weights


Evaluate = Callable[[FloatArray], Residuals]


@dataclass(frozen=True)
class Solution:
    theta: FloatArray
    spread: FloatArray
    """Of each parameter after the fit, of the logarithm; the prior's where it was put back."""
    fitted: npt.NDArray[np.bool_]
    why_not: tuple[str, ...]
    """For each parameter that was put back: why. Empty for the others."""
    evaluations: int
    converged: bool


def solve(
    evaluate: Evaluate,
    names: Sequence[str],
    spreads: FloatArray,
    bounds: FloatArray,
    steps: FloatArray,
    held: Sequence[bool],
    starts: Sequence[FloatArray] = (),
) -> Solution:
    """Fit the parameters that are not `held`. The way down begins at 0, and once more at the best
    of `starts` if that is better than 0: where the longer of two times counts, a derivative at 0
    may be blind. The lower of the two ends counts."""
    problem = _Problem(evaluate, spreads, bounds, steps)
    free = ~np.array(held, dtype=np.bool_)
    why = ["kept as asked" if h else "" for h in held]
    zero = np.zeros(len(names))
    active, reasons, theta, residuals, jacobian, converged = _way_down(
        problem, zero, free, names, why
    )
    start = _best_start(problem, zero, [s * free for s in starts])
    if start is not None:
        other = _way_down(problem, start, free, names, why)
        if problem.worse(other[3], other[2], residuals, theta) < 0:
            active, reasons, theta, residuals, jacobian, converged = other
    for _ in range(2):  # once more, when the parameters at the end turn out to be too many
        less = _reduce(problem, jacobian, residuals, active, names, reasons)
        if (less == active).all():
            break
        active, theta = less, np.where(less, theta, 0.0)
        theta, residuals, jacobian, converged = _descend(problem, theta, active)
    why = reasons
    spread = spreads.copy()
    spread[active] = problem.spread(jacobian, residuals, active)
    return Solution(theta, spread, active, tuple(why), problem.evaluations, converged)


_Way = tuple[npt.NDArray[np.bool_], list[str], FloatArray, Residuals, FloatArray, bool]
"""Active parameters, why the others are not, then what `_descend` gives."""


def _way_down(
    problem: _Problem,
    start: FloatArray,
    free: npt.NDArray[np.bool_],
    names: Sequence[str],
    why: Sequence[str],
) -> _Way:
    """Far from a minimum the errors say little of the noise: only what cannot be known however good
    the model is, is left out."""
    residuals, reasons = problem.at(start), list(why)
    jacobian = problem.jacobian(start, residuals, free)
    active = _reduce(problem, jacobian, residuals, free, names, reasons, hopeful=True)
    return (active, reasons, *_descend(problem, np.where(active, start, 0.0), active))


def _best_start(
    problem: _Problem, zero: FloatArray, starts: Sequence[FloatArray]
) -> FloatArray | None:
    best, found = problem.at(zero), None
    for start in starts:
        there = problem.at(start)
        if problem.worse(there, start, best, zero if found is None else found) < 0:
            best, found = there, start
    return found


class _Problem:
    def __init__(
        self, evaluate: Evaluate, spreads: FloatArray, bounds: FloatArray, steps: FloatArray
    ) -> None:
        self._evaluate = evaluate
        self.spreads, self.bounds, self.steps = spreads, bounds, steps
        self.evaluations = 0

    def at(self, theta: FloatArray) -> Residuals:
        self.evaluations += 1
        return self._evaluate(theta)

    def jacobian(
        self, theta: FloatArray, residuals: Residuals, active: npt.NDArray[np.bool_]
    ) -> FloatArray:
        """[values, parameters]; zero columns for those that are not active."""
        found = np.zeros((len(residuals.values), len(theta)))
        for j in np.flatnonzero(active):
            step = self.steps[j] if theta[j] + self.steps[j] <= self.bounds[j] else -self.steps[j]
            moved = theta.copy()
            moved[j] += step
            found[:, j] = (self.at(moved).values - residuals.values) / step
        for group, basis in residuals.basis.items():
            here = residuals.group == group
            found[here] = _smooth(found[here], basis)
        return found

    def worse(
        self, new: Residuals, new_theta: FloatArray, old: Residuals, old_theta: FloatArray
    ) -> float:
        """How much larger the objective is, with the weights of the old."""
        weights = old.weights()
        misfit = float(weights @ (new.values**2 - old.values**2))
        prior = float((((new_theta / self.spreads) ** 2) - (old_theta / self.spreads) ** 2).sum())
        return misfit + prior

    def information(
        self, jacobian: FloatArray, residuals: Residuals, hopeful: bool = False
    ) -> FloatArray:
        """What the data say: J' W J."""
        found: FloatArray = jacobian.T @ (residuals.weights(hopeful)[:, None] * jacobian)
        return found

    def spread(
        self,
        jacobian: FloatArray,
        residuals: Residuals,
        active: npt.NDArray[np.bool_],
        hopeful: bool = False,
    ) -> FloatArray:
        """Of the active parameters, after the data."""
        some = np.flatnonzero(active)
        data = self.information(jacobian[:, some], residuals, hopeful)
        covariance = np.linalg.inv(data + np.diag(self.spreads[some] ** -2.0))
        return np.sqrt(np.diag(covariance))


def _smooth(derivatives: FloatArray, basis: FloatArray) -> FloatArray:
    """The part of each column [values, parameters] along the basis [values, features], without the
    features that are not clear of the scatter about it."""
    along = basis.T @ derivatives
    rest = derivatives - basis @ along
    scatter = (rest**2).sum(axis=0) / max(len(basis) - basis.shape[1], 1)
    kept = np.maximum(1 - CLEAR**2 * scatter / np.maximum(along**2, 1e-300), 0.0)
    return np.asarray(basis @ (kept * along))


def _descend(
    problem: _Problem, theta: FloatArray, active: npt.NDArray[np.bool_]
) -> tuple[FloatArray, Residuals, FloatArray, bool]:
    """(theta, residuals and Jacobian there, whether it converged)."""
    some = np.flatnonzero(active)
    residuals = problem.at(theta)
    jacobian = problem.jacobian(theta, residuals, active)
    prior = problem.spreads[some] ** -2.0
    damping = 0.0
    for _ in range(ROUNDS):
        if not len(some):
            return theta, residuals, jacobian, True
        weights = residuals.weights()
        slope = jacobian[:, some].T @ (weights * residuals.values) + prior * theta[some]
        curve = problem.information(jacobian[:, some], residuals) + np.diag(prior)
        for _ in range(3):
            move = -np.linalg.solve(curve + damping * np.diag(np.diag(curve)), slope)
            limit = problem.bounds[some]
            new = theta.copy()
            new[some] = np.clip(theta[some] + move, -limit, limit)
            there = problem.at(new)
            if problem.worse(there, new, residuals, theta) <= 0:
                break
            damping = max(4 * damping, 1.0)
        else:
            return theta, residuals, jacobian, True  # no way down: here is the minimum
        moved = float(np.max(np.abs(new - theta)[some] / problem.spreads[some]))
        theta, residuals = new, there
        damping /= 4
        jacobian = problem.jacobian(theta, residuals, active)
        if moved < TOLERANCE:
            return theta, residuals, jacobian, True
    return theta, residuals, jacobian, False


def _reduce(
    problem: _Problem,
    jacobian: FloatArray,
    residuals: Residuals,
    active: npt.NDArray[np.bool_],
    names: Sequence[str],
    why: list[str],
    hopeful: bool = False,
) -> npt.NDArray[np.bool_]:
    """Without the parameters that the data do not determine, the vaguest taken out first."""
    active = active.copy()
    while active.any():
        some = np.flatnonzero(active)
        ratio = problem.spread(jacobian, residuals, active, hopeful) / problem.spreads[some]
        worst = int(np.argmax(ratio))
        if ratio[worst] <= DETERMINED:
            break
        j = int(some[worst])
        active[j] = False
        data = problem.information(jacobian, residuals, hopeful)
        alone = 1 / np.sqrt(1 + data[j, j] * problem.spreads[j] ** 2)
        why[j] = "hardly shows in these records"
        if alone <= DETERMINED:
            # It shows, but so would others: which one does most of the same?
            like = np.abs(data[j, some]) / np.sqrt(np.diag(data)[some] * data[j, j] + 1e-300)
            like[worst] = -1
            why[j] = f"shows as {names[int(some[np.argmax(like)])]} does: not told apart"
    return active
