"""Routed experts of one GPU: gate and up, activation, down, and the sum over experts."""

from __future__ import annotations

from collections.abc import Mapping
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


class Moe(Form):
    """Grouped products over the experts that are touched, padded to tiles of token rows.

    `tokens` counts over all `ep` ranks. The activation and the sum over experts run over all
    token-expert pairs, also those of other ranks (seen in vLLM's and SGLang's Triton kernels).
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
    }
    # Axes: rows per expert, experts touched, experts here, hidden, width here, topk, experts.
    covariance = (
        Component(0.1, (3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 3.0), smooth=True),
        Component(0.05, (1.5, 1.5, 1.0, 1.0, 1.0, 1.0, 2.0)),
    )
    noise = 0.0005

    def work(self, c: Columns, gpu: Gpu, key: Key, variant: Mapping[str, Any]) -> dict[str, Array]:
        stored = str(key.get("weights", key["dtype"]))
        width = DTYPE_BYTES.get(stored.removeprefix("w4a16_"), 2.0)
        hidden, inter = c["hidden"], c["inter"] / c["tp"]
        pairs = c["tokens"] * c["topk"] / c["ep"]
        local = c["experts"] / c["ep"]
        active = c["active"] if "active" in c else np.minimum(local, np.maximum(pairs, 1.0))
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
        memory = w["weights"] * (1e6 / (k["memory"] * gpu.bytes_per_s))
        serial = w["depth"] * k["serial"]
        pairs = w["pairs"] * (k["pairs"] * 1e6 / (0.8 * gpu.bytes_per_s))
        total = p_norm(k["power"], compute, memory, serial)
        return total + k["fixed"] + pairs + w["active"] * k["per_expert"]

    def axes(self, w: Mapping[str, Array]) -> list[Array]:
        names = ("rows", "active", "local", "hidden", "inter", "topk", "experts")
        return logs(*(w[n] for n in names))
