"""Hold-out tests: fit on a coarse choice of the points, predict the others.

The coarse choice is what a short calibration would measure: about twelve token counts per matrix
shape (with tile edges for 8-bit types), every fourth power of two along the axes of attention, MoE
and collectives. A second test leaves whole matrix shapes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from calibrate.fit.operator import fit_operator
from calibrate.fit.profile import Group, errors
from sim.cost.hardware import Gpu
from sim.cost.operators import FORMS
from sim.cost.operators.base import Array
from sim.cost.predictor import Operator
from sim.cost.profile import Entry

TOKEN_COUNTS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192, 32768)
TOKEN_COUNTS_8BIT = (1, 16, 64, 128, 129, 256, 512, 1024, 2048, 2049, 8192, 32768)
"""Token counts per matrix shape; 8-bit kernels change speed at tile edges."""
COARSE_AXES: Mapping[str, tuple[str, ...]] = {
    "prefill": ("batch", "q_len"),
    "decode": ("batch", "kv_len"),
    "moe": ("tokens",),
    "collective": ("bytes",),
    "elementwise": ("tokens",),
}
STEP = 3.9
"""Smallest ratio between two coarse values of an axis."""
FEWEST = 20
"""Points below which a group is not worth a test."""
FOLDS = 5


@dataclass(frozen=True)
class Test:
    """Errors of one hold-out test, per cent (median, 90th percentile)."""

    group: Group
    kind: str
    """`coarse`, `unseen shapes` or `floor`."""
    used: int
    tested: int
    form: tuple[float, float]
    """Of the form alone, without residual."""
    error: tuple[float, float]
    predicted: Array
    measured: Array


def coarse_test(group: Group, gpu: Gpu) -> Test | None:
    """Fit on the coarse points, test on the others; None when there are too few of either."""
    return _test(group, coarse(group), gpu, "coarse")


def _test(
    group: Group, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]], gpu: Gpu, kind: str
) -> Test | None:
    if len(group) < FEWEST or chosen.sum() < 6 or (~chosen).sum() < 6:
        return None
    operator = _fit(group, chosen, gpu)
    columns = {n: c[~chosen] for n, c in group.columns.items()}
    measured = group.us[~chosen]
    predicted = operator.us(columns)
    return Test(
        group,
        kind,
        int(chosen.sum()),
        len(measured),
        errors(_form_us(operator, columns), measured),
        errors(predicted, measured),
        predicted,
        measured,
    )


def floor_test(group: Group, gpu: Gpu, seed: int = 0) -> Test | None:
    """Fit on all points but one in seven of those that the coarse test predicts, test on these:
    what stays is scatter of the measurement, or structure finer than the grid it was made on."""
    rng = np.random.default_rng(seed)
    chosen = coarse(group) | (rng.random(len(group)) > 1 / 7)
    return _test(group, chosen, gpu, "floor")


def unseen_test(group: Group, gpu: Gpu, seed: int = 0) -> Test | None:
    """Matrix products of shapes (n, k) that were left out of the coarse fit, in five folds."""
    if group.op != "gemm":
        return None
    shapes = np.stack([group.columns["n"], group.columns["k"]], axis=1)
    distinct, shape_of = np.unique(shapes, axis=0, return_inverse=True)
    if len(distinct) < 4 * FOLDS:
        return None
    fold = np.random.default_rng(seed).integers(0, FOLDS, len(distinct))[shape_of.ravel()]
    chosen = coarse(group)
    predicted, form = np.zeros(len(group)), np.zeros(len(group))
    for i in range(FOLDS):
        out = fold == i
        operator = _fit(group, chosen & ~out, gpu)
        columns = {n: c[out] for n, c in group.columns.items()}
        predicted[out] = operator.us(columns)
        form[out] = _form_us(operator, columns)
    return Test(
        group,
        "unseen shapes",
        int(chosen.sum() * (FOLDS - 1) / FOLDS),
        len(group),
        errors(form, group.us),
        errors(predicted, group.us),
        predicted,
        group.us,
    )


def coarse(group: Group) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which points a short calibration would have measured."""
    if group.op == "gemm":
        short = str(group.key.get("dtype", "bf16")) in ("bf16", "fp16", "fp32")
        wanted = TOKEN_COUNTS if short else TOKEN_COUNTS_8BIT
        return np.isin(group.columns["m"], wanted)
    kept = np.ones(len(group), dtype=bool)
    for axis in COARSE_AXES[group.op]:
        kept &= np.isin(group.columns[axis], _spaced(group.columns[axis]))
    return kept


def _spaced(values: Array) -> list[float]:
    """Values of the axis at least `STEP` apart, from the smallest positive one on."""
    chosen: list[float] = []
    for value in np.unique(values).tolist():
        if not chosen or value >= STEP * chosen[-1] or chosen[-1] == 0:
            chosen.append(value)
    return chosen


def _fit(group: Group, rows: np.ndarray[tuple[int], np.dtype[np.bool_]], gpu: Gpu) -> Operator:
    form = FORMS[group.op]
    part = replace(group, columns={n: c[rows] for n, c in group.columns.items()}, us=group.us[rows])
    key = {"dtype": "bf16", **group.key} if "dtype" in form.keys else dict(group.key)
    fit = fit_operator(form, part.columns, part.us, gpu, key, most=len(part))
    return Operator(form, Entry(group.op, key, fit, len(part)), gpu)


def _form_us(operator: Operator, columns: Mapping[str, Array]) -> Array:
    fit, key = operator.entry.fit, operator.entry.key
    work = operator.form.work(columns, operator.gpu, key, fit["variant"])
    return operator.form.us(fit["coefficients"], work, operator.gpu, key, cold=False)
