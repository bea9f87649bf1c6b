"""The work of each operator: FLOPs, bytes and serial steps, and the bounded p-norm that turns
them into microseconds.

    t = ( (flops / (ec * peak))^p + (bytes / (em * bandwidth))^p + (cs * serial)^p )^(1/p) + t0

`serial` counts the dependent steps of the longest thread block, which bound a kernel that is too
small to fill the GPU. All functions take numpy arrays (or scalars) and broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.cost.hardware import Gpu
from sim.cost.models import DTYPE_BYTES

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """Work of calls of one operator, element by element."""

    flops: Array
    bytes: Array
    serial: Array
    axes: tuple[Array, ...]
    """Logarithms of what the residual depends on; see `predictor`."""


@dataclass(frozen=True)
class Roofline:
    """Coefficients of the bounded p-norm; times in microseconds."""

    compute: float
    """Reachable fraction of the peak FLOP/s (`ec`)."""
    memory: float
    """Reachable fraction of the memory bandwidth (`em`)."""
    power: float
    overhead_us: float
    serial_us: float

    def us(self, work: Work, gpu: Gpu, dtype: str) -> Array:
        """Microseconds of each call."""
        compute = work.flops * (1e6 / (self.compute * gpu.peak_flops(dtype)))
        memory = work.bytes * (1e6 / (self.memory * gpu.bytes_per_s))
        serial = work.serial * self.serial_us
        p = self.power
        total: Array = (compute**p + memory**p + serial**p) ** (1.0 / p) + self.overhead_us
        return total


def _ceil(x: npt.ArrayLike, tile: int) -> Array:
    return np.ceil(np.asarray(x, dtype=np.float64) / tile) * tile


def _log(*columns: npt.ArrayLike) -> tuple[Array, ...]:
    return tuple(np.log(np.maximum(np.asarray(c, dtype=np.float64), 1e-9)) for c in columns)


def gemm(m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, dtype: str) -> Work:
    """y[m,n] = x[m,k] w[k,n]. fp8 includes the dynamic quantisation of the 16-bit input."""
    m, n, k = (np.asarray(x, dtype=np.float64) for x in (m, n, k))
    width = DTYPE_BYTES.get(dtype, 2)
    flops = 2 * m * n * k
    moved = width * n * k + 2 * m * k + 2 * m * n
    if width < 2:
        moved = moved + (2 + 2 * width) * m * k
    return Work(flops, moved, k / 64, _log(m, n, k))


def prefill(
    batch: npt.ArrayLike,
    q_len: npt.ArrayLike,
    prefix: npt.ArrayLike,
    heads: npt.ArrayLike,
    kv_heads: npt.ArrayLike,
    head_dim: npt.ArrayLike,
    kv_dtype: str,
) -> Work:
    """Causal attention of `q_len` new tokens per sequence on `prefix` cached ones and themselves,
    in query tiles of 128 rows that are padded and each read the keys up to their own end."""
    batch, q_len, prefix, heads, kv_heads, head_dim = (
        np.asarray(x, dtype=np.float64) for x in (batch, q_len, prefix, heads, kv_heads, head_dim)
    )
    tile = np.where(q_len <= 16, 16.0, np.where(q_len <= 64, 64.0, 128.0))
    tiles = np.ceil(q_len / tile)
    keys = tiles * prefix + tile * tiles * (tiles - 1) / 2 + q_len
    flops = 4 * head_dim * heads * batch * tile * keys
    kv = batch * kv_heads * head_dim * 2 * DTYPE_BYTES.get(kv_dtype, 2)
    moved = 4 * batch * q_len * heads * head_dim + kv * (prefix + 2 * q_len)
    serial = (prefix + q_len) / 128 * (head_dim / 128)
    return Work(flops, moved, serial, _log(batch, q_len, prefix + q_len, heads, kv_heads, head_dim))


def decode(
    batch: npt.ArrayLike,
    kv_len: npt.ArrayLike,
    heads: npt.ArrayLike,
    kv_heads: npt.ArrayLike,
    head_dim: npt.ArrayLike,
    kv_dtype: str,
) -> Work:
    """Attention of one new token per sequence on `kv_len` cached ones, the heads of one KV head
    packed into tiles of at least 16 rows."""
    batch, kv_len, heads, kv_heads, head_dim = (
        np.asarray(x, dtype=np.float64) for x in (batch, kv_len, heads, kv_heads, head_dim)
    )
    rows = kv_heads * _ceil(heads / kv_heads, 16)
    flops = 4 * head_dim * rows * batch * kv_len
    kv = batch * kv_heads * head_dim * 2 * DTYPE_BYTES.get(kv_dtype, 2)
    moved = 4 * batch * heads * head_dim + kv * kv_len
    serial = np.sqrt(kv_len / 128)
    return Work(flops, moved, serial, _log(batch, kv_len, heads, kv_heads, head_dim))


def moe(
    tokens: npt.ArrayLike,
    hidden: npt.ArrayLike,
    inter: npt.ArrayLike,
    topk: npt.ArrayLike,
    experts: npt.ArrayLike,
    tp: npt.ArrayLike,
    ep: npt.ArrayLike,
    dtype: str,
) -> Work:
    """Fused experts of one rank, `tokens` counted over all `ep` ranks: tile-padded grouped
    products over the experts that a balanced routing touches."""
    tokens, hidden, inter, topk, experts, tp, ep = (
        np.asarray(x, dtype=np.float64) for x in (tokens, hidden, inter, topk, experts, tp, ep)
    )
    width = DTYPE_BYTES.get(dtype.removeprefix("w4a16_"), 2)
    pairs = tokens * topk / ep
    local = experts / ep
    active = np.minimum(local, np.maximum(pairs, 1.0))
    rows = pairs / active
    tile = np.clip(2 ** np.ceil(np.log2(np.maximum(rows, 1))), 16, 128)
    padded = active * np.ceil(rows / tile) * tile
    slice_ = hidden * inter / tp
    flops = 6 * padded * slice_
    moved = 3 * active * slice_ * width + pairs * (4 * hidden + 6 * inter / tp)
    serial = (hidden + inter / tp) / 64
    axes = _log(pairs, local, hidden, inter / tp, topk, rows)
    return Work(flops, moved, serial, axes)
