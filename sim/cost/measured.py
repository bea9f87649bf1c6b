"""The cost of one model's steps as measured on the real engine that runs them.

`calibrate run` times whole steps of the real engine under synthetic traffic, operator by operator,
and stores what it fitted as an `engine` entry of the profile. Such an entry is exact about one
model on one device, host time included, and says nothing about any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.cost.interface import FloatArray, IntArray, StepShape, StepShapes
from sim.cost.models import ModelShape
from sim.cost.profile import Entry, Profile
from sim.errors import UserError

OPERATORS = ("linear", "moe", "attention_decode", "attention_prefill", "head", "host")
"""What a step is divided into here; `PARTS` of the interface are sums of them."""


@dataclass(frozen=True)
class Curve:
    """Piecewise linear through its knots (ascending), constant before, the last slope after."""

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, x: npt.ArrayLike) -> FloatArray:
        at = np.asarray(x, dtype=np.float64)
        found: FloatArray = np.interp(at, self.knots, self.values)
        if len(self.knots) > 1:
            run = self.knots[-1] - self.knots[-2]
            slope = (self.values[-1] - self.values[-2]) / run
            found = found + np.maximum(at - self.knots[-1], 0.0) * slope
        return found


@dataclass(frozen=True)
class ChunkCost:
    """Attention of one prefill chunk of q tokens after p cached ones, microseconds:
    call + token q + square q^2 / 2 without prefix, and with one
    call + prefix_call + token q + pair q (p + q) + gather (p + q)."""

    call: float
    token: float
    square: float
    prefix_call: float
    pair: float
    gather: float

    def __call__(self, tokens: npt.ArrayLike, prefix: npt.ArrayLike) -> FloatArray:
        q = np.asarray(tokens, dtype=np.float64)
        p = np.asarray(prefix, dtype=np.float64)
        bare = self.square * (q * q / 2)
        behind = self.prefix_call + self.pair * (q * (p + q)) + self.gather * (p + q)
        found: FloatArray = self.call + self.token * q + np.where(p > 0, behind, bare)
        return found


@dataclass(frozen=True)
class GraphFit:
    """Steps of decodes alone where those run as one CUDA graph, microseconds."""

    step: Curve
    """By decodes: the graph, but for reading the cache."""
    context: Curve
    """By summed context of the decodes."""
    sample: Curve
    """By sampled requests."""


@dataclass(frozen=True)
class StepFit:
    """Microseconds of each operator of a step, over all layers."""

    linear: Curve
    """By tokens: embedding, norms, products, rotary embedding, cache write, activation."""
    graph: GraphFit | None
    """What replaces the operators in steps without prefill, where those are graphs."""
    moe: Curve
    """By tokens."""
    head: Curve
    """By sampled requests: lm_head and sampling."""
    decode_calls: Curve
    """By decodes: their attention beyond its reading of the cache."""
    decode_context: Curve
    """By summed context of the decodes."""
    decode_mixed: float
    """Factor on the decodes' attention in steps that also hold a prefill chunk."""
    chunk: ChunkCost
    host_step: float
    host_per_seq: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepFit:
        try:
            fields = dict(data)
            for name in ("linear", "moe", "head", "decode_calls", "decode_context"):
                fields[name] = _curve(data[name])
            if data["graph"] is not None:
                fields["graph"] = GraphFit(
                    **{name: _curve(data["graph"][name]) for name in ("step", "context", "sample")}
                )
            fields["chunk"] = ChunkCost(**data["chunk"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise UserError(f"damaged engine entry in the profile ({error})") from error

    def operators_us(self, shapes: StepShapes) -> dict[str, FloatArray]:
        """Microseconds per step for each of `OPERATORS`; their sum is the step."""
        steps = len(shapes.num_decodes)
        chunks = np.bincount(shapes.chunk_step, minlength=steps)
        each = self.chunk(shapes.chunk_tokens, shapes.chunk_prefix)
        prefill = np.bincount(shapes.chunk_step, weights=each, minlength=steps)
        decode = self.decode_calls(shapes.num_decodes) + self.decode_context(shapes.decode_context)
        decode = np.where(chunks > 0, decode * self.decode_mixed, decode)
        us = {
            "linear": self.linear(shapes.num_tokens),
            "moe": self.moe(shapes.num_tokens),
            "attention_decode": np.where(shapes.num_decodes > 0, decode, 0.0),
            "attention_prefill": prefill,
            "head": np.where(shapes.num_sampled > 0, self.head(shapes.num_sampled), 0.0),
            "host": self.host_step + self.host_per_seq * (shapes.num_decodes + chunks),
        }
        return us if self.graph is None else self._with_graphs(us, self.graph, shapes, chunks == 0)

    def _with_graphs(
        self,
        us: dict[str, FloatArray],
        graph: GraphFit,
        shapes: StepShapes,
        plain: npt.NDArray[np.bool_],
    ) -> dict[str, FloatArray]:
        replaced = {
            "linear": graph.step(shapes.num_decodes),
            "moe": np.zeros(len(plain)),
            "attention_decode": graph.context(shapes.decode_context),
            "head": graph.sample(shapes.num_sampled),
        }
        return {n: np.where(plain, replaced[n], v) if n in replaced else v for n, v in us.items()}


def _curve(data: Mapping[str, Any]) -> Curve:
    return Curve(tuple(data["knots"]), tuple(data["values"]))


class MeasuredCost:
    """A `CostModel` over a `StepFit`. Host time always adds to the device's, as it did when it was
    measured."""

    def __init__(self, fit: StepFit, description: Mapping[str, Any]) -> None:
        self.fit = fit
        self._description = dict(description)

    def step_ns(self, shape: StepShape) -> int:
        chunks = list(shape.prefills)
        one = StepShapes(
            num_decodes=_ints(shape.num_decodes),
            decode_tokens=_ints(shape.num_decode_tokens),
            decode_context=_ints(shape.decode_context),
            decode_context_sq=_ints(shape.decode_context_sq),
            num_sampled=_ints(shape.num_sampled),
            num_tokens=_ints(shape.num_tokens),
            chunk_step=np.zeros(len(chunks), dtype=np.int64),
            chunk_tokens=np.array([q for q, _ in chunks], dtype=np.int64),
            chunk_prefix=np.array([p for _, p in chunks], dtype=np.int64),
        )
        return int(self._total_ns(one)[0])

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        i = np.arange(n, dtype=np.int64)
        same = np.full(n, num_decodes, dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        squares = decode_context_sq + 2 * decode_context * i + num_decodes * i * i
        context = decode_context + num_decodes * i
        return self._total_ns(
            StepShapes(same, same, context, squares, same, same, none, none, none)
        )

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        us = self.fit.operators_us(shapes)
        return {
            "attention": (us["attention_decode"] + us["attention_prefill"]) * 1e-6,
            "linear": (us["linear"] + us["head"]) * 1e-6,
            "moe": us["moe"] * 1e-6,
            "communication": np.zeros(len(shapes.num_decodes)),
            "host": us["host"] * 1e-6,
        }

    def _total_ns(self, shapes: StepShapes) -> IntArray:
        us = self.fit.operators_us(shapes)
        total = us[OPERATORS[0]]
        for name in OPERATORS[1:]:
            total = total + us[name]
        return np.maximum((total * 1e3 + 0.5).astype(np.int64), 1)

    def arrival_ns(self, prompt_tokens: int) -> int:
        return 0

    def delivery_ns(self, num_running: int) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {**self._description, "extrapolated_fraction": 0.0}


def _ints(value: int) -> IntArray:
    return np.array([value], dtype=np.int64)


def engine_entry(profile: Profile, model: ModelShape) -> Entry | None:
    """What the profile knows about the real engine running this model, if anything."""
    return next((e for e in profile.of("engine") if e.key.get("model") == model.name), None)


def measured_cost(profile: Profile, model: ModelShape) -> MeasuredCost:
    """The cost model of an `engine` entry. UserError when the profile has none for the model."""
    entry = engine_entry(profile, model)
    if entry is None:
        known = sorted({str(e.key.get("model")) for e in profile.of("engine")})
        raise UserError(
            f"the profile of {profile.gpu} has no measured steps of {model.name} "
            f"(it has: {', '.join(known) or 'none'}); make one with calibrate run --model"
        )
    description = {"profile": profile.label, "provenance": entry.provenance or profile.provenance}
    return MeasuredCost(StepFit.from_json(entry.fit), description)
