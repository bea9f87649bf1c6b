"""Routed experts of one GPU: gate and up, activation, down, and the sum over experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

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

L2_SHARPNESS = 8
"""How suddenly repeated calls fall out of the L2 cache as the experts they touch outgrow it."""


class Moe(Form):
    """Grouped products over the experts that are touched, padded to tiles of token rows.

    `tokens` counts over all `ep` ranks. The activation and the sum over experts run over all
    token-expert pairs, also those of other ranks (seen in vLLM's and SGLang's Triton kernels).

    Published timings repeat one call: the few experts of a few tokens are read from the L2 cache
    (on L40S 75 MB of them take 57 us, 150 MB 260). `cold` reads all from memory.
    """

    op = "moe"
    sizes = ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep")
    keys = ("dtype", "engine", "kernel", "distribution")
    coefficients: ClassVar[Mapping[str, Coefficient]] = {
        "compute": Coefficient(0.05, 1.0, 0.6),
        "memory": Coefficient(0.2, 1.0, 0.8),
        "power": Coefficient(1.0, 6.0, 2.0),
        "fixed": Coefficient(0.5, 100.0, 15.0, log=True),
        "serial": Coefficient(1e-3, 5.0, 0.1, log=True),
        "tile": Coefficient(16.0, 128.0, 32.0, log=True),
        "last_tile": Coefficient(0.0, 1.0, 0.5),
        "pairs": Coefficient(0.0, 3.0, 0.8),
        "per_expert": Coefficient(1e-5, 3.0, 0.01, log=True),
        "l2_share": Coefficient(0.3, 1.3, 0.8),
        "l2_speed": Coefficient(1.0, 10.0, 2.0),
    }
    later = frozenset({"l2_share", "l2_speed"})
    variants = ({}, {"skew": 0.25}, {"skew": 0.5}, {"skew": 1.0})
    """How far a load is from uniform: of n pairs over E experts, E (1 - (1 + s n/E)^(-1/s)) are
    touched (a negative binomial load). {}: as many as there are pairs, up to all."""
    # Axes: rows per expert, experts touched, experts here, hidden, width here, topk, experts.
    # A broad trend, what neighbouring shapes share, and what one shape has of its own.
    covariance = (
        Component(0.1, (3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 3.0), smooth=True),
        Component(0.05, (3.0, 1.5, 1.0, 1.0, 1.0, 1.0, 2.0)),
        Component(0.02, (1.5, 1.5, 0.2, 0.2, 0.2, 0.2, 0.2)),
    )
    noise = 0.0005

    def variants_of(self, gpu: Gpu, key: Key) -> Sequence[Mapping[str, Any]]:
        if not str(key.get("distribution", "")).startswith("power_law"):
            return self.variants[:1]
        return self.variants

    def work(self, c: Columns, gpu: Gpu, key: Key, variant: Mapping[str, Any]) -> dict[str, Array]:
        stored = str(key.get("weights", key["dtype"]))
        width = DTYPE_BYTES.get(stored.removeprefix("w4a16_"), 2.0)
        hidden, inter = c["hidden"], c["inter"] / c["tp"]
        pairs = c["tokens"] * c["topk"] / c["ep"]
        local = c["experts"] / c["ep"]
        active = c["active"] if "active" in c else _touched(local, pairs, variant.get("skew", 0.0))
        rows = np.maximum(pairs / active, 1e-3)
        return {
            "rows": rows,
            "active": active + 0 * rows,
            "expert": hidden * inter,
            "weights": 3 * active * hidden * inter * width + pairs * (4 * hidden + 6 * inter),
            "pairs": c["tokens"] * c["topk"] * (3 * inter + 2 * hidden) * 2,
            "depth": (hidden + inter) / 64,
            "local": local,
            "hidden": hidden,
            "inter": inter,
            "topk": c["topk"],
            "experts": c["experts"],
        }

    def us(
        self, k: Mapping[str, float], w: Mapping[str, Array], gpu: Gpu, key: Key, *, cold: bool
    ) -> Array:
        tile = np.minimum(k["tile"], np.maximum(16.0, w["rows"]))
        padded = w["active"] * np.maximum(w["rows"] + k["last_tile"] * tile, tile)
        peak = gpu.peak_flops(str(key["dtype"]))
        compute = 6 * padded * w["expert"] * (1e6 / (k["compute"] * peak))
        moved = w["weights"]
        if not cold and "l2_speed" in k:
            hits = 1 / (1 + (moved / (k["l2_share"] * gpu.l2_mb * 2**20)) ** L2_SHARPNESS)
            moved = moved * (1 - hits * (1 - 1 / k["l2_speed"]))
        memory = moved * (1e6 / (k["memory"] * gpu.bytes_per_s))
        serial = w["depth"] * k["serial"]
        pairs = w["pairs"] * (k["pairs"] * 1e6 / (0.8 * gpu.bytes_per_s))
        total = p_norm(k["power"], compute, memory, serial)
        return total + k["fixed"] + pairs + w["active"] * k["per_expert"]

    def axes(self, w: Mapping[str, Array]) -> list[Array]:
        names = ("rows", "active", "local", "hidden", "inter", "topk", "experts")
        return logs(*(w[n] for n in names))


def _touched(local: Array, pairs: Array, skew: float) -> Array:
    """Experts that some token is routed to."""
    few = np.minimum(local, np.maximum(pairs, 1.0))
    if skew == 0:
        return few
    spread = local * (1 - (1 + skew * pairs / local) ** (-1 / skew))
    result: Array = np.clip(spread, np.minimum(pairs, 1.0), local)
    return result
