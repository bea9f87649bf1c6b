"""From measured steps to a `StepFit`: non-negative least squares on what the work depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calibrate.engine.executor import MeasuredStep
from sim.cost.interface import StepShapes
from sim.cost.measured import ChunkCost, Curve, GraphFit, StepFit

FloatArray = npt.NDArray[np.float64]

GROUPS: dict[str, tuple[str, ...]] = {
    "linear": ("embedding", "norm", "qkv", "rope", "o", "gate_up", "act", "down", "graph"),
    "moe": ("moe",),
    "attention_decode": ("attention_decode",),
    "attention_prefill": ("attention_prefill",),
    "head": ("lm_head", "sample"),
}
"""The decoder's operators in each of a `StepFit`'s; what is in none is the host's."""
NOTHING = Curve((1.0,), (0.0,))
MODERATE = 0.995
"""Samples above this quantile of their ratio to the fit are cut there: a page fault is no work."""


def shapes_of(steps: Sequence[MeasuredStep]) -> StepShapes:
    """The shapes of many steps in columns."""
    chunks = [(i, q, p) for i, s in enumerate(steps) for q, p in s.shape.prefills]
    flat = np.array(chunks, dtype=np.int64).reshape(-1, 3)

    def column(of: Callable[[MeasuredStep], int]) -> npt.NDArray[np.int64]:
        return np.array([of(s) for s in steps], dtype=np.int64)

    return StepShapes(
        num_decodes=column(lambda s: s.shape.num_decodes),
        decode_tokens=column(lambda s: s.shape.num_decode_tokens),
        decode_context=column(lambda s: s.shape.decode_context),
        decode_context_sq=column(lambda s: s.shape.decode_context_sq),
        num_sampled=column(lambda s: s.shape.num_sampled),
        num_tokens=column(lambda s: s.shape.num_tokens),
        chunk_step=flat[:, 0],
        chunk_tokens=flat[:, 1],
        chunk_prefix=flat[:, 2],
    )


def operators_us(steps: Sequence[MeasuredStep]) -> dict[str, FloatArray]:
    """Measured microseconds per step for each operator of a `StepFit`; the host has the rest."""
    found = {
        group: np.array([sum(s.operators.get(o, 0) for o in ops) / 1e3 for s in steps])
        for group, ops in GROUPS.items()
    }
    total = np.array([s.ns / 1e3 for s in steps])
    found["host"] = np.maximum(total - sum(found.values()), 0.0)
    return found


def fit_steps(steps: Sequence[MeasuredStep], speed: FloatArray | None = None) -> StepFit:
    """Fit the mean time of every operator. `speed` is the machine's slowness in each step, which
    the times are divided by. Raises ValueError for fewer than 20 steps."""
    if len(steps) < 20:
        raise ValueError(f"{len(steps)} steps are too few to fit a step's cost")
    shapes = shapes_of(steps)
    slow = np.ones(len(steps)) if speed is None else speed
    us = {name: values / slow for name, values in operators_us(steps).items()}
    chunks = np.bincount(shapes.chunk_step, minlength=len(steps))
    tokens, sampled = shapes.num_tokens, shapes.num_sampled
    graphed = np.array(["graph" in s.operators for s in steps])
    # Operators show only in steps that were no graphs; without any, graphs must do.
    eager = ~graphed if (~graphed).sum() >= 10 else np.full(len(steps), True)
    calls, context, decode_mixed = _fit_decode(shapes, us["attention_decode"], eager, chunks > 0)
    sampling = eager & (sampled > 0)
    # What the host does per token (building the input) goes by tokens, like the products.
    step, per_seq, per_token = _nnls(
        np.stack([np.ones(len(steps)), shapes.num_decodes + chunks, tokens], axis=1).astype(
            np.float64
        ),
        us["host"],
    )
    return StepFit(
        linear=_plus(_fit_curve(tokens[eager], us["linear"][eager]), per_token),
        graph=_fit_graphs(shapes, us, graphed, per_token),
        moe=_fit_curve(tokens[eager], us["moe"][eager]) if us["moe"].any() else NOTHING,
        head=_fit_curve(sampled[sampling], us["head"][sampling]) if sampling.any() else NOTHING,
        decode_calls=calls,
        decode_context=context,
        decode_mixed=decode_mixed,
        chunk=_fit_chunks(shapes, us["attention_prefill"], chunks),
        host_step=float(step),
        host_per_seq=float(per_seq),
    )


def _fit_decode(
    shapes: StepShapes,
    y: FloatArray,
    eager: npt.NDArray[np.bool_],
    chunked: npt.NDArray[np.bool_],
) -> tuple[Curve, Curve, float]:
    """Attention of decodes by their number and by their summed context, and its factor in steps
    that also hold chunks."""
    decoding = eager & (shapes.num_decodes > 0)
    if not decoding.any():
        return NOTHING, NOTHING, 1.0
    alone, mixed = decoding & ~chunked, decoding & chunked
    if alone.sum() < 20:  # the factor cannot be told apart
        calls, context = _fit_calls_and_context(shapes, y, decoding)
        return calls, context, 1.0
    calls, context = _fit_calls_and_context(shapes, y, alone)
    if not mixed.any():
        return calls, context, 1.0
    as_alone = calls(shapes.num_decodes[mixed]) + context(shapes.decode_context[mixed])
    return calls, context, max(1.0, float(y[mixed].sum() / max(as_alone.sum(), 1e-9)))


def _fit_graphs(
    shapes: StepShapes,
    us: dict[str, FloatArray],
    graphed: npt.NDArray[np.bool_],
    per_token: float,
) -> GraphFit | None:
    if graphed.sum() < 10:
        return None
    step, context = _fit_calls_and_context(shapes, us["linear"], graphed)
    sample = _fit_curve(shapes.num_sampled[graphed], us["head"][graphed])
    return GraphFit(_plus(step, per_token), context, sample)


def _fit_curve(x: npt.NDArray[np.int64], y: FloatArray) -> Curve:
    """A non-decreasing piecewise-linear curve with knots at powers of two."""
    knots = _knots(float(x.max()))
    coefficients = _nnls(_hinges(x.astype(np.float64), knots), y)
    return _curve(knots, _hinges(np.array(knots), knots) @ coefficients)


def _fit_calls_and_context(
    shapes: StepShapes, y: FloatArray, rows: npt.NDArray[np.bool_]
) -> tuple[Curve, Curve]:
    """A sum of a curve by decodes and one by their summed context, which starts at zero."""
    n = shapes.num_decodes[rows].astype(np.float64)
    context = shapes.decode_context[rows].astype(np.float64)
    n_knots, far = _knots(n.max()), [0.0, 1024.0]
    while far[-1] * 4 < context.max() / 2:
        far.append(far[-1] * 4)
    far = [*(k for k in far if k < context.max()), context.max()]
    columns = np.concatenate((_hinges(n, n_knots), _hinges(context, far)[:, 1:]), axis=1)
    coefficients = _nnls(columns, y[rows])
    of_n, of_context = coefficients[: len(n_knots)], coefficients[len(n_knots) :]
    calls = _hinges(np.array(n_knots), n_knots) @ of_n
    read = _hinges(np.array(far), far)[:, 1:] @ of_context
    return _curve(n_knots, calls), _curve(far, read)


def _curve(knots: Sequence[float], values: FloatArray) -> Curve:
    return Curve(tuple(float(k) for k in knots), tuple(values.tolist()))


def _fit_chunks(shapes: StepShapes, y: FloatArray, chunks: npt.NDArray[np.int64]) -> ChunkCost:
    if not chunks.any():
        return ChunkCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    q = shapes.chunk_tokens.astype(np.float64)
    p = shapes.chunk_prefix.astype(np.float64)
    behind = (p > 0).astype(np.float64)
    each = (np.ones_like(q), q, (1 - behind) * q * q / 2, behind, behind * q * (p + q),
            behind * (p + q))  # fmt: skip
    columns: FloatArray = np.stack(
        [np.bincount(shapes.chunk_step, weights=c, minlength=len(y)) for c in each], axis=1
    ).astype(np.float64)
    rows = chunks > 0
    call, token, square, prefix_call, pair, gather = _nnls(columns[rows], y[rows]).tolist()
    if pair == 0.0 and not behind.any():
        # Nothing had a prefix: the arithmetic is the same, over a rectangle.
        pair = square / 2
    return ChunkCost(call, token, square, prefix_call, pair, gather)


def _knots(largest: float) -> list[float]:
    knots = [1.0]
    while knots[-1] * 1.5 < largest:
        knots.append(knots[-1] * 2)
    if largest > knots[-1]:
        knots.append(largest)
    return knots


def _hinges(x: FloatArray, knots: Sequence[float]) -> FloatArray:
    """Columns whose non-negative combinations are the non-decreasing curves on the knots: one,
    and the way travelled in each interval (the last goes on)."""
    columns = [np.ones_like(x)]
    for i, low in enumerate(knots[:-1]):
        high = knots[i + 1] if i + 2 < len(knots) else np.inf
        columns.append(np.clip(x, low, high) - low)
    return np.stack(columns, axis=1)


def _nnls(columns: FloatArray, y: FloatArray) -> FloatArray:
    """Non-negative coefficients with the smallest squared relative error, fitted to the mean.

    Two rounds: the second weighs by the fit of the first, and cuts what is far above it.
    """
    weight = 1.0 / np.maximum(y, max(float(y.mean()) * 0.05, 1e-3))
    coefficients = _solve(columns, y, weight)
    for _ in range(2):
        fitted = np.maximum(columns @ coefficients, max(float(y.mean()) * 0.05, 1e-3))
        ratio = y / fitted
        most = max(float(np.quantile(ratio, MODERATE)), 1.5)
        coefficients = _solve(columns, np.minimum(y, fitted * most), 1.0 / fitted)
    return coefficients


def _solve(columns: FloatArray, y: FloatArray, weight: FloatArray) -> FloatArray:
    """Lawson and Hanson's active-set method (Solving Least Squares Problems, 1974, ch. 23)."""
    a, b = columns * weight[:, None], y * weight
    size = np.linalg.norm(a, axis=0)
    size[size == 0] = 1.0
    a = a / size
    count = a.shape[1]
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    tolerance = 1e-9 * float(np.abs(a.T @ b).max() + 1e-30)
    for _ in range(10 * count):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (trial[free] > 0).all():
                x = trial
                break
            back = free & (trial <= 0)
            step = float((x[back] / (x[back] - trial[back])).min())
            x = x + step * (trial - x)
            free &= x > 1e-12
            x[~free] = 0.0
            if not free.any():
                break
    solution: FloatArray = x / size
    return solution


def _plus(curve: Curve, slope: float) -> Curve:
    values = (v + slope * k for k, v in zip(curve.knots, curve.values, strict=True))
    return Curve(curve.knots, tuple(values))


@dataclass(frozen=True)
class OperatorError:
    """Errors of predictions against measured steps, relative."""

    steps: int
    median: float
    p90: float
    bias: float
    """Error of the sum over the steps."""
    share: float
    """Of all measured time."""


def operator_errors(
    fit: StepFit, steps: Sequence[MeasuredStep], speed: FloatArray | None = None
) -> dict[str, OperatorError]:
    """Errors per operator and, as `step`, of whole steps. `speed` as in `fit_steps`: it
    multiplies the predictions. Steps that do not run an operator are left out of its errors."""
    slow = np.ones(len(steps)) if speed is None else speed
    predicted = {n: v * slow for n, v in fit.operators_us(shapes_of(steps)).items()}
    measured = operators_us(steps)
    predicted["step"] = np.sum(list(predicted.values()), axis=0)
    measured["step"] = np.array([s.ns / 1e3 for s in steps])
    whole = float(measured["step"].sum())
    found = {}
    for name, real in measured.items():
        rows = real > 1.0
        if not rows.any():
            continue
        error = np.abs(predicted[name][rows] / real[rows] - 1)
        found[name] = OperatorError(
            steps=int(rows.sum()),
            median=float(np.median(error)),
            p90=float(np.quantile(error, 0.9)),
            bias=float(predicted[name][rows].sum() / real[rows].sum() - 1),
            share=float(real.sum() / whole),
        )
    return found
