"""Attention over a paged KV cache: prefill chunks, and batches of decodes."""

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
"""How suddenly a repeated call falls out of the L2 cache as its KV outgrows it."""


def _kv_bytes(c: Columns, key: Key) -> Array:
    """Bytes of keys and values of one position of all sequences."""
    width = DTYPE_BYTES.get(str(key.get("kv_dtype", "bf16")), 2.0)
    return c["batch"] * c["kv_heads"] * c["head_dim"] * 2 * width


class Prefill(Form):
    """Causal attention of `q_len` new tokens per sequence after `prefix` cached ones.

    One thread block per tile of query rows and head. The keys of the prefix are the same for all
    tiles, so they come in whole waves of blocks over the GPU, at a higher rate than the triangle of
    the chunk itself (`prefix_gain`: 1.28 where prefixes were timed, kept where they were not); that
    one is balanced, but no faster than its longest tile.
    """

    op = "prefill"
    sizes = ("batch", "q_len", "prefix", "heads", "kv_heads", "head_dim")
    keys = ("dtype", "kv_dtype", "engine", "kernel")
    coefficients: ClassVar[Mapping[str, Coefficient]] = {
        "compute": Coefficient(0.05, 1.0, 0.6),
        "memory": Coefficient(0.1, 1.0, 0.8),
        "power": Coefficient(1.0, 8.0, 2.0),
        "fixed": Coefficient(0.5, 60.0, 9.0, log=True),
        "whole_waves": Coefficient(0.0, 1.0, 0.7),
        "per_wave": Coefficient(1e-3, 20.0, 0.5, log=True),
        "balance": Coefficient(1.0, 8.0, 2.0),
        "longest": Coefficient(0.3, 2.3, 1.0),
        "prefix_gain": Coefficient(0.7, 2.0, 1.28),
    }
    variants = (
        {"tile": 64, "pack": False},
        {"tile": 128, "pack": False},
        {"tile": 128, "pack": True},
    )
    """Query rows per tile; `pack`: the heads of one KV head share tiles (FlashAttention-3)."""
    # Axes: thread blocks, mean keys per block, rows, heads per KV head, head size, batch, heads,
    # KV heads. The first five carry over to unseen shapes and prefixes.
    covariance = (
        Component(0.1, (4.0, 4.0, 4.0, 4.0, 4.0, None, None, None), smooth=True),
        Component(0.05, (1.5, 1.5, 2.0, 3.0, 2.0, 6.0, 6.0, 6.0)),
    )
    noise = 0.001

    def variants_of(self, gpu: Gpu, key: Key) -> Sequence[Mapping[str, Any]]:
        kernel = str(key.get("kernel", "")).lower()
        if gpu.attention == "fa2" and "flash_attn" in kernel:
            # FlashAttention-2 over a paged cache: 64 rows, whatever a fit without prefixes prefers.
            return self.variants[:1]
        return self.variants

    def work(self, c: Columns, gpu: Gpu, key: Key, variant: Mapping[str, Any]) -> dict[str, Array]:
        batch, q, prefix = c["batch"], c["q_len"], c["prefix"]
        heads, kv_heads, dim = c["heads"], c["kv_heads"], c["head_dim"]
        tile, group = float(variant["tile"]), heads / kv_heads
        rows = q * group if variant["pack"] else q
        tiles = np.ceil(rows / tile)
        blocks = batch * (kv_heads if variant["pack"] else heads) * tiles
        own = q * (tiles + 1) / (2 * tiles)
        kv = _kv_bytes(c, key)
        return {
            "per_key": 4 * dim * tile * gpu.sms + 0 * blocks,
            "prefix": prefix + 0 * blocks,
            "total": blocks * own / gpu.sms,
            "longest": q + 0 * blocks,
            "waves": blocks / gpu.sms,
            "bytes": 4 * batch * q * heads * dim + kv * (prefix + 2 * q),
            "blocks": blocks,
            "keys": prefix + own,
            "q_len": q,
            "group": group,
            "dim": dim,
            "batch": batch,
            "heads": heads,
            "kv_heads": kv_heads,
        }

    def us(
        self, k: Mapping[str, float], w: Mapping[str, Array], gpu: Gpu, key: Key, *, cold: bool
    ) -> Array:
        whole = k["whole_waves"]
        waves = whole * np.ceil(w["waves"]) + (1 - whole) * np.maximum(w["waves"], 1.0)
        own = p_norm(k["balance"], w["total"], k["longest"] * w["longest"])
        flops = w["per_key"] * (w["prefix"] * waves / k["prefix_gain"] + own)
        compute = flops * (1e6 / (k["compute"] * gpu.peak_flops("bf16")))
        memory = w["bytes"] * (1e6 / (k["memory"] * gpu.bytes_per_s))
        return p_norm(k["power"], compute, memory) + k["fixed"] + w["waves"] * k["per_wave"]

    def axes(self, w: Mapping[str, Array]) -> list[Array]:
        names = ("blocks", "keys", "q_len", "group", "dim", "batch", "heads", "kv_heads")
        return logs(*(w[n] for n in names))


class Decode(Form):
    """Attention of one new token per sequence on `kv_len` cached ones.

    Published timings repeat one call, so KV that fits the L2 cache is read from there. In a model
    the other layers come between: `cold` prices every byte at memory speed.
    """

    op = "decode"
    sizes = ("batch", "kv_len", "heads", "kv_heads", "head_dim")
    keys = ("dtype", "kv_dtype", "engine", "kernel")
    coefficients: ClassVar[Mapping[str, Coefficient]] = {
        "compute": Coefficient(0.05, 1.0, 0.7),
        "memory": Coefficient(0.3, 1.0, 0.85),
        "power": Coefficient(1.0, 8.0, 2.0),
        "fixed": Coefficient(0.5, 60.0, 9.0, log=True),
        "serial": Coefficient(1e-3, 20.0, 0.5, log=True),
        "l2_share": Coefficient(0.3, 1.3, 0.9),
        "l2_speed": Coefficient(1.0, 10.0, 2.5),
        "per_wave": Coefficient(1e-3, 20.0, 0.1, log=True),
    }
    # Axes: keys of all blocks, batch, keys, heads per KV head, head size, thread blocks. Unseen
    # numbers of KV heads are most like those with as many sequences and as many keys in all.
    covariance = (
        Component(0.1, (3.0, 3.0, None, 3.0, 2.0, None), smooth=True),
        Component(0.05, (4.0, 3.0, 3.0, 1.5, 1.0, 3.0)),
    )
    noise = 0.001

    def work(self, c: Columns, gpu: Gpu, key: Key, variant: Mapping[str, Any]) -> dict[str, Array]:
        batch, keys, heads = c["batch"], c["kv_len"], c["heads"]
        kv_heads, dim = c["kv_heads"], c["head_dim"]
        group = heads / kv_heads
        rows = kv_heads * np.ceil(group / 16) * 16
        return {
            "flops": 4 * dim * rows * batch * keys,
            "kv": _kv_bytes(c, key) * keys,
            "io": 4 * batch * heads * dim,
            "serial": np.sqrt(keys / 128),
            "waves": batch * heads / gpu.sms,
            "blocks": batch * kv_heads,
            "keys": keys,
            "group": group,
            "dim": dim,
            "batch": batch,
        }

    def us(
        self, k: Mapping[str, float], w: Mapping[str, Array], gpu: Gpu, key: Key, *, cold: bool
    ) -> Array:
        compute = w["flops"] * (1e6 / (k["compute"] * gpu.peak_flops("bf16")))
        moved = w["kv"]
        if not cold:
            fill = w["kv"] / (k["l2_share"] * gpu.l2_mb * 2**20)
            hits = 1 / (1 + fill**L2_SHARPNESS)
            moved = moved * (1 - hits * (1 - 1 / k["l2_speed"]))
        memory = (moved + w["io"]) * (1e6 / (k["memory"] * gpu.bytes_per_s))
        serial = w["serial"] * k["serial"]
        waves = w["waves"] * k["per_wave"]
        return p_norm(k["power"], compute, memory, serial, waves) + k["fixed"]

    def axes(self, w: Mapping[str, Array]) -> list[Array]:
        total = w["blocks"] * w["keys"]
        return logs(total, w["batch"], w["keys"], w["group"], w["dim"], w["blocks"])
