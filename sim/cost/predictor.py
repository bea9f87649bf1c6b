"""Microseconds of single operator calls on one GPU, from its profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.cost import hardware, routing
from sim.cost.derived import GDDR_GAIN, gains_from_gddr
from sim.cost.hardware import Gpu
from sim.cost.models import DTYPE_BYTES
from sim.cost.operators import FORMS, Form
from sim.cost.operators.base import Array, Columns
from sim.cost.profile import Entry, Profile, built_in
from sim.cost.residual import Residual

KERNEL_US = 2.0
"""Shortest time of a small kernel inside a CUDA graph (notes on the open deployments)."""
STREAM_EFFICIENCY = 0.8
"""Fraction of the memory bandwidth that elementwise kernels reach."""
RANK_SKEW_US = 3.7
"""What a collective waits for the slowest rank, per doubling of the ranks beyond two; benchmarks
run in lockstep. (Fitted on the open deployments with two and four ranks.)"""
STREAM_US = 12.0
STREAM_SHARE = 0.9
"""In a model, a decode call of FlashAttention-3 lasts no longer than this plus reading its KV at
that share of the bandwidth, as published calls with long contexts do. Those with short contexts and
many equal sequences are up to 20 % slower: their thread blocks start and end in waves, which the
unequal contexts of real requests smear out. (Seen in the open deployments of Llama-2-7B, whose
steps are half attention: within 2 % so, 8 % too slow without.)"""
MEMORY_MODE: Mapping[str, float] = {"L40S": 1.06}
"""GPUs whose published calls show two memory speeds, in a model's step over most of the calls: on
L40S decode attention runs at 620 or at 720 GB/s, from one row to the next, mostly at 620; the open
deployment needs the faster one."""
SUSTAINED: Mapping[str, float] = {"RTX-4090": 1.0, "RTX-PRO-6000": 1.15}
"""How much slower products are under steady load than in the burst in which they were timed, where
the GPU says more about it than the source of the timings (`fit["burst"]`): GeForce cards multiply
with 32-bit accumulation at half rate and stay below their power limit, a workstation card with the
same chip at full rate does not. (One open deployment each.)"""
FP8_OVER_BLOCK = 0.955
"""Experts with one scale per channel, where only block-scaled ones were timed: from the ratios of
both to 16 bits (0.565 on L40S, 0.59 on H100)."""


@dataclass(frozen=True)
class Operator:
    """A fitted operator: its form times exp(residual)."""

    form: Form
    entry: Entry
    gpu: Gpu

    @cached_property
    def residual(self) -> Residual:
        return Residual.from_json(self.entry.fit["residual"])

    def us(self, columns: Columns, *, in_model: bool = False) -> Array:
        """Microseconds of the calls whose sizes are given: as they were timed, or as part of a
        model's step, without the launch that was timed with each call, with caches that hold
        other layers' data (see `Form.us`), at the clocks of a GPU that is busy all the time."""
        fit, key = self.entry.fit, self.entry.key
        coefficients = fit["coefficients"]
        gpu = self.gpu
        if in_model and "burst" in fit:
            burst = SUSTAINED.get(gpu.name, fit["burst"])
            coefficients = {**coefficients, "compute": coefficients["compute"] / burst}
        if in_model and gpu.name in MEMORY_MODE:
            gpu = replace(gpu, bandwidth=gpu.bandwidth * MEMORY_MODE[gpu.name])
        work = self.form.work(columns, gpu, key, fit["variant"])
        base = self.form.us(coefficients, work, gpu, key, cold=in_model)
        result: Array = base * np.exp(self.residual(self.form.axes(work)))
        return result - fit.get("launch_us", 0.0) if in_model else result


class Predictor:
    """Predictions for one GPU. Arguments broadcast; results are microseconds per call.

    What the profile lacks (an operator, a data type) comes from the built-in profiles of the GPU
    and of its nearest relative.
    """

    def __init__(self, profile: Profile, gpu: Gpu) -> None:
        profile.require(gpu)
        self.profile = profile
        self._datasheet = gpu
        if profile.derived_for is not None and gains_from_gddr(gpu, hardware.gpu(profile.gpu)):
            gpu = replace(gpu, bandwidth=gpu.bandwidth * GDDR_GAIN)
        self.gpu = gpu
        self._chosen: dict[tuple[Any, ...], Operator] = {}

    def gemm_us(self, m: npt.ArrayLike, n: int, k: int, dtype: str) -> Array:
        """x[m,k] w[k,n]; `dtype` is the weights' (`bf16`, `fp8`, `int4`, ...)."""
        us = self._operator("gemm", dtype=dtype).us(_columns(m=m, n=n, k=k), in_model=True)
        return self._streamed(us, n * k, dtype)

    def prefill_us(
        self,
        q_len: npt.ArrayLike,
        prefix: npt.ArrayLike,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: str,
        batch: npt.ArrayLike = 1,
    ) -> Array:
        """Attention of `batch` chunks of `q_len` tokens after `prefix` cached ones."""
        columns = _columns(
            batch=batch,
            q_len=q_len,
            prefix=prefix,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )
        return self._operator("prefill", kv_dtype=kv_dtype).us(columns, in_model=True)

    def decode_us(
        self,
        batch: npt.ArrayLike,
        kv_len: npt.ArrayLike,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: str,
    ) -> Array:
        """Attention of `batch` sequences, one new token each, `kv_len` tokens of KV each."""
        columns = _columns(
            batch=batch, kv_len=kv_len, heads=heads, kv_heads=kv_heads, head_dim=head_dim
        )
        us = self._operator("decode", kv_dtype=kv_dtype).us(columns, in_model=True)
        if self.gpu.attention != "fa3":
            return us
        kv = np.asarray(batch) * np.asarray(kv_len) * (2 * kv_heads * head_dim)
        seconds = kv * DTYPE_BYTES.get(kv_dtype, 2.0) / (STREAM_SHARE * self.gpu.bytes_per_s)
        bounded: Array = np.minimum(us, STREAM_US + seconds * 1e6)
        return bounded

    def moe_us(
        self,
        tokens: npt.ArrayLike,
        hidden: int,
        inter: int,
        topk: int,
        experts: int,
        tp: int,
        ep: int,
        dtype: str,
    ) -> Array:
        """Routed experts of the busiest GPU; `tokens` counted over `ep` ranks. Benchmarks deal
        tokens out evenly; here every token picks its experts (see `routing`)."""
        columns = _columns(
            tokens=tokens, hidden=hidden, inter=inter, topk=topk, experts=experts, tp=tp, ep=ep
        )
        touched = routing.touched_experts(columns["tokens"], experts, topk)
        columns["active"] = np.maximum(touched / ep, 1e-3)
        columns["tokens"] = columns["tokens"] * routing.busiest_rank(experts, ep)
        chosen = self._operator("moe", dtype=dtype, distribution="balanced")
        us = chosen.us(columns, in_model=True)
        if dtype == "fp8" and chosen.entry.key.get("dtype") == "fp8_block":
            us = us * FP8_OVER_BLOCK
        return self._streamed(us, 3 * columns["active"] * (hidden * inter / tp), dtype)

    def _streamed(self, us: Array, weights: npt.ArrayLike, dtype: str) -> Array:
        """`us`, but no less than reading that many weights at the datasheet's bandwidth: benchmarks
        repeat one call, and small weights stay in the L2 cache; a model's other layers evict them.
        """
        size = np.asarray(weights, dtype=np.float64) * DTYPE_BYTES.get(dtype, 2.0)
        bounded: Array = np.maximum(us, size * (1e6 / self._datasheet.bytes_per_s))
        return bounded

    def collective_us(self, op: str, size: npt.ArrayLike, world: int) -> Array:
        """`size` bytes over `world` GPUs of one node, inside a CUDA graph."""
        if world == 1:
            return np.zeros_like(np.asarray(size, dtype=np.float64))
        chosen = self._operator("collective", op=op, world=world)
        known = int(chosen.entry.key["world"])
        us = chosen.us(_columns(bytes=size))
        # A world size that was not timed: the same bytes per link, one step more per doubling.
        share = ((world - 1) / world) / ((known - 1) / known)
        if known != world:
            us = us * share + float(np.log2(world / known))
        return us + RANK_SKEW_US * float(np.log2(max(world / 2, 1)))

    def elementwise_us(self, moved: npt.ArrayLike) -> Array:
        """One norm, rotary embedding, activation, ... that moves that many bytes."""
        moved = np.asarray(moved, dtype=np.float64)
        result: Array = KERNEL_US + moved * (1e6 / (STREAM_EFFICIENCY * self.gpu.bytes_per_s))
        return result

    def points_us(self, op: str, columns: Columns, key: Mapping[str, Any]) -> Array:
        """Measured-like calls of any operator: warm caches, the entry nearest to the key."""
        return self._operator(op, **key).us(columns)

    def range_of(self, form: str, size: str, /, **key: Any) -> tuple[float, float]:
        """Smallest and largest value of a size that was timed; unlimited where it was not kept."""
        low, high = self._operator(form, **key).entry.ranges.get(size, (0.0, float("inf")))
        return float(low), float(high)

    def sources(self) -> list[str]:
        """Which entries of which profiles were used so far, for people."""
        return sorted({describe(o.entry) for o in self._chosen.values()})

    def _operator(self, form: str, /, **key: Any) -> Operator:
        sought = (form, *sorted(key.items()))
        found = self._chosen.get(sought)
        if found is None:
            entry = choose(self.profile.of(form), key)
            if entry is None or _misses(entry, key):
                best = [choose(p.of(form), key) for p in (self.profile, *built_in(self.gpu))]
                # The nearest data type, number of GPUs, ...; among equals the profile given first.
                entry = min(
                    (e for e in best if e is not None),
                    key=lambda e: _badness(e, key)[:ESSENTIAL],
                    default=None,
                )
            if entry is None:
                raise LookupError(f"no profile knows the operator {form!r}")
            entry = replace(entry, key={**entry.key, **_weight_only(entry, key)})
            found = self._chosen[sought] = Operator(FORMS[form], entry, self.gpu)
        return found


ENGINE_RANK = ("vllm", "sglang", "trtllm", "nccl", "deepgemm", "flashinfer", "lls", "sarathi")
"""Whose kernels stand for vLLM's, best first."""
SAME_DTYPE = {"fp16": "bf16", "fp32": "bf16"}
AVOID = ("modeloptfp8moe_flashinf", "fp8moe_flashinfer_cutla", "eager")
"""Kernels that describe vLLM's defaults badly: FlashInfer's fp8 experts (slower than bf16 ones, and
five times too slow for a real deployment), eager collectives."""
DTYPE_FALLBACK = {
    "fp8": ("fp8_block", "bf16"),
    "fp8_block": ("fp8", "bf16"),
    "int8": ("fp8", "fp8_block", "bf16"),
    "nvfp4": ("fp8", "bf16"),
    "mxfp4": ("w4a16_mxfp4", "bf16"),
}
"""Nearest data types that may have been timed instead."""


ESSENTIAL = 5
"""The first so many terms of `_badness` say what was timed, the others by whom."""


def choose(entries: Iterable[Entry], key: Mapping[str, Any]) -> Entry | None:
    """The entry nearest to the key: equal where it says something, vLLM's kernels elsewhere."""
    return min(entries, key=lambda e: _badness(e, key), default=None)


def _badness(entry: Entry, key: Mapping[str, Any]) -> tuple[float, ...]:
    has = entry.key
    named = [n for n in ("engine", "kernel", "impl", "model", "source", "node") if n in key]
    engine = str(has.get("engine", ""))
    rank = next((i for i, e in enumerate(ENGINE_RANK) if engine.startswith(e)), len(ENGINE_RANK))
    if "graph" in str(has.get("impl", "")):
        rank -= 1  # vLLM replays its all-reduce inside CUDA graphs
    text = " ".join(str(v) for v in has.values())
    exact = [n for n in ("dtype", "kv_dtype") if n in key and str(has.get(n, "")) != str(key[n])]
    return (
        float("op" in key and has.get("op") != key["op"]),
        float(not named and any(a in text for a in AVOID)),
        _dtype_distance(str(has.get("dtype", "")), key.get("dtype")),
        _dtype_distance(str(has.get("kv_dtype", "")), key.get("kv_dtype")),
        abs(np.log2(int(has["world"]) / int(key["world"]))) if "world" in key else 0.0,
        float(sum(str(has.get(n, "")) != str(key[n]) for n in named)),
        float(bool(named) and len(exact)),
        float(has.get("node", "") != key.get("node", "")),
        float("distribution" in key and has.get("distribution") != key["distribution"]),
        float(rank),
        -_version(engine),
        -float(entry.points),
    )


def _version(engine: str) -> float:
    """`vllm-0.24.0` -> 24.0: later versions first."""
    parts = engine.rsplit("-", 1)[-1].split(".")
    return float(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0.0


def _dtype_distance(has: str, wanted: object) -> float:
    if wanted is None:
        return 0.0
    name = str(wanted)
    if has == name:
        return 0.0
    name, has = SAME_DTYPE.get(name, name), SAME_DTYPE.get(has, has)
    if has == name:
        return 0.0
    near = DTYPE_FALLBACK.get(name, ("bf16",))
    return 1.0 + near.index(has) if has in near else 9.0


def _misses(entry: Entry, key: Mapping[str, Any]) -> bool:
    """Whether the entry is of another data type or world size than asked for."""
    distance = _dtype_distance(str(entry.key.get("dtype", "")), key.get("dtype"))
    distance += _dtype_distance(str(entry.key.get("kv_dtype", "")), key.get("kv_dtype"))
    other_op = "op" in key and entry.key.get("op") != key["op"]
    other_world = "world" in key and int(entry.key["world"]) != int(key["world"])
    return distance >= 1.0 or other_op or other_world


def _weight_only(entry: Entry, key: Mapping[str, Any]) -> dict[str, Any]:
    """Weights in fewer bits than the kernel that was timed computes in are unpacked on the fly:
    its arithmetic, their bytes."""
    wanted = str(key.get("dtype", ""))
    return {"weights": wanted} if _narrower(wanted, str(entry.key.get("dtype", ""))) else {}


def _narrower(wanted: str, timed: str) -> bool:
    width = DTYPE_BYTES.get(wanted)
    return width is not None and width < DTYPE_BYTES.get(timed.removeprefix("w4a16_"), 0)


def describe(entry: Entry) -> str:
    """An entry in one line: `gemm bf16 vllm-0.24.0 torch.linear`."""
    return " ".join([entry.op, *(str(v) for v in entry.key.values() if v != "")])


def _columns(**sizes: npt.ArrayLike) -> dict[str, Array]:
    return {name: np.asarray(value, dtype=np.float64) for name, value in sizes.items()}
