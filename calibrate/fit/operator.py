"""Fit one operator under one key: coefficients of its form, then the residual around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, cholesky, lapack
from scipy.optimize import least_squares

from sim.cost.hardware import Gpu
from sim.cost.operators.base import Array, Coefficient, Columns, Component, Form, Key
from sim.cost.residual import Residual, covariance_matrix

MAX_FORM_POINTS = 1200
"""Points that fit the few coefficients of a form."""
MAX_RESIDUAL_POINTS = 4000
"""Points the residual keeps unless asked for more; it is solved densely."""
MAX_SCALE_POINTS = 400
"""Points that choose the residual's variance and noise."""
SOFT = 0.1
"""Relative error beyond which a point counts as an outlier of the form."""
SCALES = (0.3, 1.0, 3.0)
NOISES = (0.5, 1.0, 3.0)
NOISES_WITH_TAILS = (0.5, 1.0, 3.0, 10.0)
REWEIGHTINGS = 2
"""Times that the noise of each point is estimated anew; more change nothing that matters."""
FEWEST_PLAIN = 20
"""Points without exceptions (`Form.exceptions`) from which on these are left out of the form."""


def fit_operator(
    form: Form,
    columns: Columns,
    us: Array,
    gpu: Gpu,
    key: Key,
    seed: int = 0,
    most: int = MAX_RESIDUAL_POINTS,
) -> dict[str, Any]:
    """The fit of one operator, as an `Entry` stores it. `us` are positive; at least one point.
    Few points fit fewer things: below four the form's own coefficients are only scaled."""
    rng = np.random.default_rng(seed)
    columns, us = _merged(columns, us)
    plain = _plain(form, columns, gpu, key)
    chosen = plain[_thinned(len(plain), MAX_FORM_POINTS, rng)]
    best: tuple[float, Mapping[str, Any], dict[str, float]] | None = None
    for variant in form.variants_of(gpu, key):
        work = form.work(_rows(columns, chosen), gpu, key, variant)
        cost, coefficients = _fit_form(form, work, us[chosen], gpu, key)
        if best is None or cost < best[0]:
            best = (cost, variant, coefficients)
    assert best is not None
    _, variant, coefficients = best
    kept = _thinned(len(us), most, rng)
    work = form.work(_rows(columns, kept), gpu, key, variant)
    error = np.log(us[kept] / form.us(coefficients, work, gpu, key, cold=False))
    axes = np.stack(np.broadcast_arrays(*form.axes(work)), axis=1)
    residual = fit_residual(axes, error, form.covariance, form.noise, rng, form.tails)
    return {
        "variant": dict(variant),
        "coefficients": {k: float(f"{v:.6g}") for k, v in coefficients.items()},
        "residual": residual.to_json(),
    }


def _merged(columns: Columns, us: Array) -> tuple[dict[str, Array], Array]:
    """Repeated shapes become one point: their geometric mean. The order of the rows does not
    matter, not even to the last bit."""
    names = list(columns)
    table = np.stack([columns[n] for n in names], axis=1)
    order = np.argsort(us, kind="stable")
    table, us = table[order], us[order]
    rows, row_of = np.unique(table, axis=0, return_inverse=True)
    count = np.bincount(row_of.ravel())
    mean = np.bincount(row_of.ravel(), weights=np.log(us)) / count
    return {n: rows[:, i] for i, n in enumerate(names)}, np.exp(mean)


def _plain(form: Form, columns: Columns, gpu: Gpu, key: Key) -> np.ndarray:
    """Rows that the form is fitted on."""
    odd = form.exceptions(form.work(columns, gpu, key, form.variants[0]))
    rows = None if odd is None else np.flatnonzero(~odd)
    if rows is None or len(rows) < FEWEST_PLAIN:
        return np.arange(len(columns[form.sizes[0]]))
    return rows


def _thinned(count: int, most: int, rng: np.random.Generator) -> np.ndarray:
    if count <= most:
        return np.arange(count)
    return np.sort(rng.permutation(count)[:most])


def _rows(columns: Columns, rows: np.ndarray) -> dict[str, Array]:
    return {n: c[rows] for n, c in columns.items()}


def _fit_form(
    form: Form, work: Mapping[str, Array], us: Array, gpu: Gpu, key: Key
) -> tuple[float, dict[str, float]]:
    """(cost per point, coefficients) by robust least squares on the logarithm of the time."""
    names = list(form.coefficients)
    bounds = [form.coefficients[n] for n in names]
    measured = np.log(us)

    def price(z: Array) -> dict[str, float]:
        return {n: _bounded(b, float(v)) for n, b, v in zip(names, bounds, z, strict=True)}

    def error(z: Array) -> Array:
        difference: Array = np.log(form.us(price(z), work, gpu, key, cold=False)) - measured
        return difference

    # The power decides which minimum is found; start from a soft and a sharp corner.
    best: tuple[float, dict[str, float]] | None = None
    for power in (1.5, 4.0) if "power" in names and len(us) >= 4 else (None,):
        start = np.array(
            [
                _unbounded(b, power if n == "power" and power else b.start)
                for n, b in zip(names, bounds, strict=True)
            ]
        )
        # A weak pull to the start keeps coefficients that the points say nothing about.
        pull = 1e-3 * np.sqrt(len(us))
        found = least_squares(
            lambda z, s=start, w=pull: np.concatenate((error(z), w * (z - s))),
            start,
            loss="soft_l1",
            f_scale=SOFT,
            max_nfev=120,
        )
        cost = float(found.cost) / len(us)
        if best is None or cost < best[0]:
            best = (cost, price(found.x))
    assert best is not None
    return best


def _bounded(b: Coefficient, z: float) -> float:
    """From the whole line to the coefficient's interval."""
    part = 1 / (1 + np.exp(-np.clip(z, -30, 30)))
    if b.log:
        return float(b.low * (b.high / b.low) ** part)
    return float(b.low + (b.high - b.low) * part)


def _unbounded(b: Coefficient, value: float) -> float:
    if b.log:
        part = np.log(value / b.low) / np.log(b.high / b.low)
    else:
        part = (value - b.low) / (b.high - b.low)
    part = float(np.clip(part, 1e-3, 1 - 1e-3))
    return float(np.log(part / (1 - part)))


def fit_residual(
    axes: Array,
    values: Array,
    covariance: tuple[Component, ...],
    noise: float,
    rng: np.random.Generator,
    tails: float | None = None,
) -> Residual:
    """Solve for the residual's weights. Variance and noise come from the likelihood of a sample:
    published rows differ by an order of magnitude in how much they scatter. `tails`: see `Form`."""
    some = _thinned(len(values), MAX_SCALE_POINTS, rng)
    best: tuple[float, float, float] | None = None
    shared = covariance_matrix(axes[some], axes[some], covariance)
    for scale in SCALES:
        for more in NOISES if tails is None else NOISES_WITH_TAILS:
            loss = _unlikeliness(scale * shared, values[some], noise * more, tails)
            if best is None or loss < best[0]:
                best = (loss, scale, more)
    assert best is not None
    _, scale, more = best
    scaled = tuple(replace(c, variance=c.variance * scale) for c in covariance)
    matrix = covariance_matrix(axes, axes, scaled)
    return Residual(axes, _solve(matrix, values, noise * more, tails).weights, scaled)


def _unlikeliness(matrix: Array, values: Array, noise: float, tails: float | None) -> float:
    """Negative log likelihood of the values under the covariance, constants left out."""
    try:
        return _solve(matrix, values, noise, tails).loss
    except LinAlgError:
        return float("inf")


@dataclass(frozen=True)
class _Solution:
    weights: Array
    loss: float
    """Negative log likelihood, with `tails` a bound of it; constants left out."""


def _solve(matrix: Array, values: Array, noise: float, tails: float | None) -> _Solution:
    """Weights of the Gaussian process through noisy values.

    Student's t is a Gaussian whose variance is itself random: a variational posterior of the
    variances, one per point, gives points far from what all others say a larger one.
    """
    variance = np.full(len(values), noise)
    factor, weights = _factor(matrix, values, variance)
    if tails is None:
        return _Solution(weights, float(0.5 * values @ weights + _half_log_det(factor)))
    for _ in range(REWEIGHTINGS):
        off = _expected_squares(factor, weights, variance)
        variance = noise * (tails + off / noise) / (tails + 1)
        factor, weights = _factor(matrix, values, variance)
    off = _expected_squares(factor, weights, variance)
    gaussian = 0.5 * values @ weights + _half_log_det(factor)
    gaussian -= 0.5 * np.sum(np.log(variance) + off / variance)
    heavy = 0.5 * np.sum((tails + 1) * np.log1p(off / (tails * noise)) + np.log(noise))
    return _Solution(weights, float(gaussian + heavy))


def _factor(matrix: Array, values: Array, variance: Array) -> tuple[Array, Array]:
    """(Cholesky factor of the noisy covariance, weights)."""
    noisy = matrix.copy()
    noisy[np.diag_indices_from(noisy)] += variance
    factor: Array = cholesky(noisy, lower=True, overwrite_a=True)
    return factor, cho_solve((factor, True), values)


def _expected_squares(factor: Array, weights: Array, variance: Array) -> Array:
    """Posterior mean of the squared distance between each value and the process."""
    inverse = lapack.dpotri(factor, lower=1)[0]
    spread = variance - variance**2 * np.diag(inverse)
    result: Array = (variance * weights) ** 2 + np.maximum(spread, 0.0)
    return result


def _half_log_det(factor: Array) -> float:
    return float(np.log(np.diag(factor)).sum())
