"""The residual of an operator: what was measured nearby, smoothed, as a Gaussian process.

    residual(x) = sum_i weight_i * covariance(x, x_i)

The covariance is a sum of components, each a product over the axes, so an axis on which all
queries agree can be folded into the weights beforehand. That makes tables cheap: a thousand points
over two varying axes cost a few hundred distinct positions. Far from all points the residual
fades to nothing and the physical form stands alone.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.operators.base import Array, Component

SQRT3 = 3.0**0.5
CHUNK = 2048
"""Queries handled at a time, to bound memory."""


@dataclass(frozen=True)
class Residual:
    """Positions [points, axes] and weights [points] of a fitted residual (a logarithm)."""

    positions: Array
    weights: Array
    covariance: tuple[Component, ...]

    def __call__(self, axes: Sequence[Array]) -> Array:
        """The residual at the broadcast axes. A form may have got axes since it was fitted: they
        come last and are left out."""
        axes = axes[: self.positions.shape[1]]
        shape = np.broadcast_shapes(*(a.shape for a in axes))
        columns = [np.broadcast_to(a, shape).ravel() for a in axes]
        if shape == () or len(columns[0]) == 0 or len(self.weights) == 0:
            queries = np.array([[float(c[0]) for c in columns]]) if shape == () else None
            if queries is None or len(self.weights) == 0:
                return np.zeros(shape)
            return self._at(queries).reshape(shape)
        return self._at(np.stack(columns, axis=1)).reshape(shape)

    def _at(self, queries: Array) -> Array:
        fixed = np.array([bool(np.all(q == q[0])) for q in queries.T])
        varying = np.flatnonzero(~fixed)
        places, place_of = _distinct(self.positions[:, varying])
        result = np.zeros(len(queries))
        for component in self.covariance:
            weights = self.weights
            for axis in np.flatnonzero(fixed):
                length = component.lengths[axis]
                if length is not None:
                    away = np.abs(self.positions[:, axis] - queries[0, axis]) / length
                    weights = weights * correlation(away, component.smooth)
            folded = np.bincount(place_of, weights=weights, minlength=len(places))
            for start in range(0, len(queries), CHUNK):
                part = queries[start : start + CHUNK, varying]
                near = _covariance(part, places, component, varying)
                result[start : start + CHUNK] += component.variance * (near @ folded)
        return result

    def to_json(self) -> dict[str, Any]:
        """Axes as a table of distinct values and indices, numbers as base64 of little-endian
        arrays: compact, and equal for equal fits."""
        columns = []
        for column in self.positions.T:
            values, index = np.unique(column.astype(np.float32), return_inverse=True)
            columns.append({"values": _pack(values, "<f4"), "index": _pack(index, "<u2")})
        return {
            "axes": columns,
            "weights": _pack(self.weights, "<f4"),
            "covariance": [
                {"variance": c.variance, "lengths": list(c.lengths), "smooth": c.smooth}
                for c in self.covariance
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Residual:
        columns = [
            _unpack(c["values"], "<f4").astype(np.float64)[_unpack(c["index"], "<u2")]
            for c in data["axes"]
        ]
        covariance = tuple(
            Component(c["variance"], tuple(c["lengths"]), c["smooth"]) for c in data["covariance"]
        )
        weights = _unpack(data["weights"], "<f4").astype(np.float64)
        return cls(np.stack(columns, axis=1), weights, covariance)


def correlation(away: Array, smooth: bool) -> Array:
    """Correlation at a distance in lengths: Gaussian, or Matern 3/2."""
    if smooth:
        result: Array = np.exp(-0.5 * away * away)
        return result
    scaled = SQRT3 * away
    result = (1 + scaled) * np.exp(-scaled)
    return result


def covariance_matrix(left: Array, right: Array, components: Sequence[Component]) -> Array:
    """[len(left), len(right)] covariance of two sets of positions."""
    axes = np.arange(left.shape[1])
    total = np.zeros((len(left), len(right)))
    for component in components:
        total += component.variance * _covariance(left, right, component, axes)
    return total


def _covariance(left: Array, right: Array, component: Component, axes: np.ndarray) -> Array:
    """Correlations along the given axes (columns of both) of one component."""
    product = np.ones((len(left), len(right)))
    squares: Array | None = None
    for column, axis in enumerate(axes):
        length = component.lengths[axis]
        if length is None:
            continue
        # Grids repeat few values per axis: compute those once and spread them, rows last.
        a, a_of = np.unique(left[:, column], return_inverse=True)
        b, b_of = np.unique(right[:, column], return_inverse=True)
        away = np.abs(a[:, None] - b[None, :]) / length
        if component.smooth:
            square = (away * away)[:, b_of][a_of]
            squares = square if squares is None else squares + square
        else:
            product *= correlation(away, smooth=False)[:, b_of][a_of]
    if squares is not None:
        product = np.exp(-0.5 * squares)
    return product


def _distinct(rows: Array) -> tuple[Array, np.ndarray]:
    if rows.shape[1] == 0:
        return np.zeros((1, 0)), np.zeros(len(rows), dtype=np.int64)
    places, place_of = np.unique(rows, axis=0, return_inverse=True)
    return places, place_of.ravel()


def _pack(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=kind).tobytes()).decode()


def _unpack(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=kind)
