"""What every operator's cost has in common: a form with bounded coefficients, and a residual.

    t = form(coefficients, work) * exp(residual(axes))

A form turns the columns of a call (sizes) into its work and prices it with a few coefficients:
reachable fractions of the GPU's peaks, fixed times, tile effects. The residual corrects it by
what was measured nearby; see `sim.cost.residual`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sim.cost.hardware import Gpu

Array = npt.NDArray[np.float64]
Columns = Mapping[str, Array]
"""Sizes by name, as float arrays that broadcast against each other."""
Key = Mapping[str, Any]
"""What a measurement does not vary over: dtype, engine, kernel, world size, ..."""


@dataclass(frozen=True)
class Coefficient:
    """A coefficient's bounds and where a fit starts; `log` fits its logarithm."""

    low: float
    high: float
    start: float
    log: bool = False


@dataclass(frozen=True)
class Component:
    """One term of the residual's covariance: a variance and a length per axis (None: ignores it);
    `smooth` is Gaussian, otherwise Matern 3/2 along each axis."""

    variance: float
    lengths: tuple[float | None, ...]
    smooth: bool = False


class Form:
    """The cost of one operator. Stateless; subclasses say everything in class attributes and three
    methods. All times are microseconds."""

    op: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]]
    """Columns a call must have."""
    keys: ClassVar[tuple[str, ...]]
    """Columns that make the key, those that are there."""
    coefficients: ClassVar[Mapping[str, Coefficient]]
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """Discrete choices (tile sizes, ...); a fit takes the best."""
    covariance: ClassVar[tuple[Component, ...]]
    later: ClassVar[frozenset[str]] = frozenset()
    """Coefficients that entries fitted by earlier versions lack; without them the effect is not
    priced, and these entries mean what they meant."""
    earlier_axes: ClassVar[int | None] = None
    """Number of axes of earlier versions' residuals, the first ones of today's."""
    noise: ClassVar[float]
    """Variance of a measurement's logarithm that is not worth reproducing."""
    tails: ClassVar[float | None] = None
    """Degrees of freedom of that noise as Student's t, where some published calls are far off for
    no reason in their sizes; None: Gaussian."""

    def variants_of(self, gpu: Gpu, key: Key) -> Sequence[Mapping[str, Any]]:
        """The variants that the kernel of the key may be; all, unless it is known better."""
        return self.variants

    def work(self, c: Columns, gpu: Gpu, key: Key, variant: Mapping[str, Any]) -> dict[str, Array]:
        """What the price and the residual depend on, computed once per set of calls."""
        raise NotImplementedError

    def us(
        self, k: Mapping[str, float], w: Mapping[str, Array], gpu: Gpu, key: Key, *, cold: bool
    ) -> Array:
        """Price of the calls with coefficients `k`. `cold`: nothing of the call's data is left in
        the L2 cache from a call just before, as in a real model; benchmarks repeat one call."""
        raise NotImplementedError

    def axes(self, w: Mapping[str, Array]) -> list[Array]:
        """Coordinates of the residual, one array per axis of `covariance`. New axes come last:
        residuals fitted before ignore them."""
        raise NotImplementedError

    def exceptions(self, w: Mapping[str, Array]) -> npt.NDArray[np.bool_] | None:
        """Calls that run another kernel and must not bend the coefficients; the residual alone
        corrects them. None: there are none."""
        return None


def p_norm(power: float, *terms: Array) -> Array:
    """(sum of terms^power)^(1/power): the largest, rounded off where two are close."""
    total = terms[0] ** power
    for term in terms[1:]:
        total = total + term**power
    result: Array = total ** (1.0 / power)
    return result


def logs(*columns: npt.ArrayLike) -> list[Array]:
    """Logarithms, broadcast to one shape."""
    arrays = np.broadcast_arrays(*(np.asarray(c, dtype=np.float64) for c in columns))
    return [np.log(np.maximum(a, 1e-9)) for a in arrays]
