"""Matrix products y[m, n] = x[m, k] w[k, n]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sim.cost.hardware import Gpu
from sim.cost.models import DTYPE_BYTES
from sim.cost.operators.base import (
    Array,
    Coefficient,
    Columns,
    Component,
    Form,
    Key,
    logs,
    p_norm,
)

TILE = 128
"""Rows of the usual output tile."""
TILES = (64, 128, 256)
"""Rows that kernels may work on at once; what is left of the last tile costs as much as a full one,
so times are stairs over m, with steps that differ between kernels."""


class Gemm(Form):
    """Compute, bytes and the serial loop over k, in a p-norm. `padding` is how much of the last
    tile's unused rows is computed all the same; libraries switch to smaller tiles to avoid it.
    8-bit rows include the dynamic quantisation of the 16-bit input. A key may name other `weights`
    than the kernel's dtype: those are read in their own width and unpacked on the fly."""

    op = "gemm"
    sizes = ("m", "n", "k")
    keys = ("dtype", "engine", "kernel")
    coefficients: ClassVar[Mapping[str, Coefficient]] = {
        "compute": Coefficient(0.02, 1.0, 0.7),
        "memory": Coefficient(0.02, 1.02, 0.8),
        "power": Coefficient(1.0, 8.0, 2.0),
        "fixed": Coefficient(0.1, 60.0, 3.0, log=True),
        "serial": Coefficient(1e-4, 1.0, 0.03, log=True),
        "padding": Coefficient(0.0, 1.0, 0.5),
    }
    later = frozenset({"padding"})
    earlier_axes = 5
    variants = ({}, {"tile": 2 * TILE})
    """Rows of the output tile (`TILE`), or of two that run in a cluster."""
    # Axes: m, n, k, unaligned rows, waste of the last tile, a single row (another kernel), m in
    # whole tiles of each size. A broad trend, what neighbouring shapes share, what one (n, k) has
    # of its own, and the stairs of each tile size.
    covariance = (
        Component(0.008, (3.0, 2.0, 2.0, 1.0, 0.5, 0.5, None, None, None), smooth=True),
        Component(0.014, (1.0, 0.7, 0.7, 1.0, 0.5, 0.3, None, None, None)),
        Component(0.01, (1.0, 0.05, 0.05, 1.0, 0.5, 0.3, None, None, None)),
        Component(0.015, (None, 0.7, 0.7, None, None, 0.3, 1.0, None, None)),
        Component(0.015, (None, 0.7, 0.7, None, None, 0.3, None, 1.0, None)),
        Component(0.015, (None, 0.7, 0.7, None, None, 0.3, None, None, 1.0)),
    )
    # Published rows are bimodal by up to 17 % between neighbouring sizes, differently in every
    # measurement; a model has dozens of weights, so their average is what counts.
    noise = 0.006
    tails = 4.0

    def work(self, c: Columns, gpu: Gpu, key: Key, variant: Mapping[str, Any]) -> dict[str, Array]:
        m, n, k = c["m"], c["n"], c["k"]
        width = DTYPE_BYTES.get(str(key.get("weights", key["dtype"])), 2.0)
        moved = width * n * k + 2 * m * (k + n)
        if width < 2 and "weights" not in key:
            moved = moved + (2 + 2 * width) * m * k
        tile = float(variant.get("tile", TILE))
        filled = np.where(m > tile / 2, np.ceil(m / tile) * tile / np.maximum(m, 1), 1.0)
        return {
            "flops": 2 * m * n * k,
            "filled": filled + 0 * n * k,
            "bytes": moved,
            "m": m,
            "n": n,
            "k": k,
        }

    def us(
        self, k: Mapping[str, float], w: Mapping[str, Array], gpu: Gpu, key: Key, *, cold: bool
    ) -> Array:
        flops = w["flops"] * w["filled"] ** k["padding"] if "padding" in k else w["flops"]
        compute = flops * (1e6 / (k["compute"] * gpu.peak_flops(str(key["dtype"]))))
        memory = w["bytes"] * (1e6 / (k["memory"] * gpu.bytes_per_s))
        serial = w["k"] * (k["serial"] / 64)
        return p_norm(k["power"], compute, memory, serial) + k["fixed"]

    def axes(self, w: Mapping[str, Array]) -> list[Array]:
        m = w["m"]
        many = m > TILE / 2
        unaligned = np.where(many & (m % 16 != 0), 1.0, 0.0)
        waste = np.where(many, np.log(np.ceil(m / TILE) * TILE / m), 0.0)
        single = np.where(m == 1, 1.0, 0.0)
        stairs = [np.log(np.maximum(np.ceil(m / tile), 1) * tile) for tile in TILES]
        return [
            *logs(m, w["n"], w["k"]),
            *np.broadcast_arrays(unaligned, waste, single, *stairs, w["n"], w["k"])[:-2],
        ]

    def exceptions(self, w: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = np.asarray(w["m"] == 1)
        return found
