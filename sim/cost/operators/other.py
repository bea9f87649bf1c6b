"""Collectives between the GPUs of one node, and elementwise kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from sim.cost.hardware import Gpu
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


class Collective(Form):
    """`bytes` over `world` GPUs: a latency, a small-message slope and a bandwidth."""

    op = "collective"
    sizes = ("bytes",)
    keys = ("op", "dtype", "world", "impl", "engine")
    coefficients: ClassVar[Mapping[str, Coefficient]] = {
        "bandwidth": Coefficient(0.005, 1.3, 0.6, log=True),
        "power": Coefficient(0.6, 6.0, 1.5),
        "fixed": Coefficient(0.5, 500.0, 6.0, log=True),
    }
    covariance = (
        Component(0.1, (3.0,), smooth=True),
        Component(0.05, (2.0,)),
    )
    noise = 0.0005
    tails = 4.0  # single sizes up to three times slower than both neighbours

    def work(self, c: Columns, gpu: Gpu, key: Key, variant: Mapping[str, Any]) -> dict[str, Array]:
        world = float(key["world"])
        share = (world - 1) / world * (2 if key["op"] == "all_reduce" else 1)
        return {"bytes": c["bytes"], "moved": c["bytes"] * share}

    def us(
        self, k: Mapping[str, float], w: Mapping[str, Array], gpu: Gpu, key: Key, *, cold: bool
    ) -> Array:
        moving = w["moved"] * (1e6 / (k["bandwidth"] * gpu.link_bytes_per_s))
        return p_norm(k["power"], moving, np.full_like(moving, k["fixed"]))

    def axes(self, w: Mapping[str, Array]) -> list[Array]:
        return logs(w["bytes"])


class Elementwise(Form):
    """Norms, rotary embedding, activation, sampler, ...: `tokens` rows of `dim` elements."""

    op = "elementwise"
    sizes = ("tokens", "dim", "tp")
    keys = ("op", "model", "source")
    coefficients: ClassVar[Mapping[str, Coefficient]] = {
        "bytes_per_element": Coefficient(0.05, 200.0, 8.0, log=True),
        "power": Coefficient(1.0, 6.0, 1.5),
        "fixed": Coefficient(0.2, 200.0, 2.0, log=True),
    }
    covariance = (
        Component(0.1, (3.0, 3.0, 3.0), smooth=True),
        Component(0.05, (1.5, 1.0, 1.0)),
    )
    noise = 0.002

    def work(self, c: Columns, gpu: Gpu, key: Key, variant: Mapping[str, Any]) -> dict[str, Array]:
        return {"elements": c["tokens"] * c["dim"], **c}

    def us(
        self, k: Mapping[str, float], w: Mapping[str, Array], gpu: Gpu, key: Key, *, cold: bool
    ) -> Array:
        moving = w["elements"] * (k["bytes_per_element"] * 1e6 / gpu.bytes_per_s)
        return p_norm(k["power"], moving, np.full_like(moving, k["fixed"]))

    def axes(self, w: Mapping[str, Array]) -> list[Array]:
        return logs(w["tokens"], w["dim"], w["tp"])
