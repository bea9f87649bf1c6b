"""From measured points to entries of a profile: a bounded p-norm roofline per operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.cost import rooflines
from sim.cost.hardware import Gpu
from sim.cost.profile import Entry
from sim.cost.rooflines import Roofline, Work

FloatArray = npt.NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]
HOLD_OUT = 4
"""Every so many-th point is held out to check the fit of the others; the first two, which are the
ends of the range, never."""


@dataclass(frozen=True)
class PointFit:
    """What was fitted for one operator, and how well it predicts points it has not seen."""

    entry: Entry
    holdout_median: float
    """Per cent."""
    holdout_p90: float
    held: int


def fit_tables(tables: Mapping[str, Rows], gpu: Gpu, provenance: str) -> list[PointFit]:
    """Fit every operator of `PointStore.tables` that a roofline describes. Groups of fewer than
    six points are left out."""
    found = []
    for table, rows in tables.items():
        if table not in _WORK:
            continue
        groups: dict[tuple[tuple[str, Any], ...], list[Mapping[str, Any]]] = {}
        for row in rows:
            key = {name: row[name] for name in _KEYS if name in row}
            groups.setdefault(tuple(key.items()), []).append(row)
        for items, members in groups.items():
            if len(members) >= 6:
                found.append(_fit(table, dict(items), members, gpu, provenance))
    return found


_KEYS = ("dtype", "kv_dtype", "engine", "kernel", "distribution")
_OPS = {"gemm": "gemm", "attn_prefill": "prefill", "attn_decode": "decode", "moe": "moe"}
_RANGES = ("m", "n", "k", "batch", "q_len", "prefix", "kv_len", "tokens")


def _column(rows: Rows, name: str) -> FloatArray:
    return np.array([row[name] for row in rows], dtype=np.float64)


def _columns(rows: Rows, *names: str) -> list[FloatArray]:
    return [_column(rows, name) for name in names]


def _gemm(rows: Rows) -> Work:
    m, n, k = _columns(rows, "m", "n", "k")
    return rooflines.gemm(m, n, k, str(rows[0]["dtype"]))


def _prefill(rows: Rows) -> Work:
    batch, q, prefix = _columns(rows, "batch", "q_len", "prefix")
    heads, kv_heads, dim = _columns(rows, "heads", "kv_heads", "head_dim")
    return rooflines.prefill(batch, q, prefix, heads, kv_heads, dim, str(rows[0]["kv_dtype"]))


def _decode(rows: Rows) -> Work:
    batch, kv_len = _columns(rows, "batch", "kv_len")
    heads, kv_heads, dim = _columns(rows, "heads", "kv_heads", "head_dim")
    return rooflines.decode(batch, kv_len, heads, kv_heads, dim, str(rows[0]["kv_dtype"]))


def _moe(rows: Rows) -> Work:
    tokens, hidden, inter, topk = _columns(rows, "tokens", "hidden", "inter", "topk")
    experts, tp, ep = _columns(rows, "experts", "tp", "ep")
    dtype = str(rows[0]["dtype"])
    return rooflines.moe(tokens, hidden, inter, topk, experts, tp, ep, dtype)


_WORK: dict[str, Callable[[Rows], Work]] = {
    "gemm": _gemm,
    "attn_prefill": _prefill,
    "attn_decode": _decode,
    "moe": _moe,
}


def _fit(table: str, key: dict[str, Any], rows: Rows, gpu: Gpu, provenance: str) -> PointFit:
    dtype = str(key["dtype"])
    held = np.arange(len(rows)) % HOLD_OUT == HOLD_OUT - 1
    kept = [row for row, h in zip(rows, held, strict=True) if not h]
    checked = [row for row, h in zip(rows, held, strict=True) if h]
    median = p90 = float("nan")
    if checked:
        roofline = fit_roofline(_WORK[table](kept), _column(kept, "us"), gpu, dtype)
        predicted = roofline.us(_WORK[table](checked), gpu, dtype)
        error = 100 * np.abs(predicted / _column(checked, "us") - 1)
        median, p90 = float(np.median(error)), float(np.quantile(error, 0.9))
    us = _column(rows, "us")
    roofline = fit_roofline(_WORK[table](rows), us, gpu, dtype)
    error = 100 * np.abs(roofline.us(_WORK[table](rows), gpu, dtype) / us - 1)
    entry = Entry(
        op=_OPS[table],
        key=key,
        fit={"roofline": asdict(roofline)},
        points=len(rows),
        ranges={n: (float(c.min()), float(c.max())) for n in _RANGES if n in rows[0]
                for c in [_column(rows, n)]},
        error={"median": float(np.median(error)), "p90": float(np.quantile(error, 0.9)),
               "holdout_median": median, "holdout_p90": p90},
        provenance=provenance,
    )  # fmt: skip
    return PointFit(entry, median, p90, len(checked))


def fit_roofline(work: Work, us: FloatArray, gpu: Gpu, dtype: str) -> Roofline:
    """The coefficients with the smallest robust error of log time (Levenberg-Marquardt from two
    starts, Huber weights)."""
    target = np.log(us)

    def residual(z: FloatArray) -> FloatArray:
        return np.log(_roofline(z).us(work, gpu, dtype)) - target

    best: tuple[float, FloatArray] | None = None
    for power in (-1.5, 0.5):
        start = np.array([0.8, 1.0, power, np.log(max(float(us.min()) * 0.3, 1e-3)), np.log(0.05)])
        z = _levenberg_marquardt(residual, start)
        size = np.abs(residual(z))
        loss = float(np.where(size < 0.1, size**2, 0.2 * size - 0.01).sum())
        if best is None or loss < best[0]:
            best = (loss, z)
    if best is None:
        raise ValueError("no start")
    return _roofline(best[1])


def _roofline(z: FloatArray) -> Roofline:
    """Efficiencies up to a little above one, a power between 1 and 8, positive times."""

    def between(low: float, high: float, x: float) -> float:
        return low + (high - low) / (1 + float(np.exp(-np.clip(x, -30, 30))))

    overhead, serial = np.exp(np.clip(z[3:5], -20, 20))
    return Roofline(
        between(0.01, 1.2, z[0]), between(0.01, 1.2, z[1]), between(1, 8, z[2]),
        float(overhead), float(serial),
    )  # fmt: skip


def _levenberg_marquardt(
    residual: Callable[[FloatArray], FloatArray], start: FloatArray, rounds: int = 80
) -> FloatArray:
    z, damping = start, 1e-2
    r = residual(z)
    for _ in range(rounds):
        weight = np.sqrt(np.minimum(1.0, 0.1 / np.maximum(np.abs(r), 1e-9)))
        jacobian = np.stack(
            [(residual(z + 1e-4 * unit) - r) / 1e-4 for unit in np.eye(len(z))], axis=1
        )
        a, b = jacobian * weight[:, None], r * weight
        normal = a.T @ a
        ridge = damping * (np.diag(np.diag(normal)) + 1e-9 * np.eye(len(z)))
        step = np.linalg.solve(normal + ridge, -a.T @ b)
        trial = z + np.clip(step, -1.0, 1.0)
        now = residual(trial)
        if float(((now * weight) ** 2).sum()) < float((b**2).sum()):
            z, r, damping = trial, now, max(damping / 3, 1e-9)
            if float(np.abs(step).max()) < 1e-5:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return z
