"""One prefill and one decode instance, for the deployments that were split so.

As vLLM's disaggregated prefill works: the proxy lets the prefill instance compute the prompt (and
one token that nobody sees), then sends the request to the decode instance, which fetches the KV
cache and generates every token the client gets. What is modelled: both queues, the transfer at the
speed of the link, no prefill work on the decode instance. What is not: the proxy's own time,
contention on the link, and stalls of the decode instance while it loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from calibrate.validation.client import Client
from calibrate.validation.deployment import Deployment
from calibrate.validation.outcome import Values, measure
from calibrate.validation.workloads import Load
from policies.admission.always import Always
from policies.routing.round_robin import RoundRobin
from sim.cluster.clock import Clock, Rank
from sim.cluster.cluster import Cluster
from sim.cost.interface import CostModel, FloatArray, IntArray, StepShape, StepShapes
from sim.cost.memory import kv_dtype_of
from sim.cost.parallel import RankPlan
from sim.engine.config import EngineConfig
from sim.engine.interface import Engine, RequestRecord
from sim.request import Request

MakeEngine = Callable[[EngineConfig, CostModel], Engine]


def run_disaggregated(
    server: Deployment, cost: CostModel, load: Load, make_engine: MakeEngine
) -> Values:
    """One seed; metrics as the client of the pair sees them."""
    clock = Clock()
    pair = Pair(clock, server, cost, make_engine)
    client = Client(clock, pair, load)
    client.start()
    clock.run()
    return measure(pair.decode.records.columns(), [pair.decode_log], cost, client.stage_of)


class Pair:
    """A prefill and a decode instance behind one proxy."""

    def __init__(
        self, clock: Clock, server: Deployment, cost: CostModel, make_engine: MakeEngine
    ) -> None:
        self.on_leave: Callable[[RequestRecord], None] | None = None
        self._clock = clock
        self._waiting: dict[int, Request] = {}
        config = server.engine
        # Prompts arrive on the decode instance as finished KV: whatever their length, one step.
        loading = replace(config, max_num_batched_tokens=config.max_model_len)
        self.decode_cost = LoadedPrompts(cost)
        engines = (make_engine(config, cost), make_engine(loading, self.decode_cost))
        self.decode_log = engines[1].log
        self.prefill, self.decode = (
            Cluster(clock, [engine], config, cost, Always(), RoundRobin()) for engine in engines
        )
        self.prefill.on_leave = self._prefilled
        self.decode.on_leave = self._left
        rank = RankPlan.of(server.model, config)
        per_token = rank.kv_bytes_per_token(kv_dtype_of(server.model, config))
        self._transfer_ns_per_token = per_token / server.gpu.link_bytes_per_s * 1e9

    def enter(self, request: Request) -> None:
        self._waiting[request.uid] = request
        self.prefill.enter(replace(request, output_tokens=1))

    def _prefilled(self, record: RequestRecord) -> None:
        request = self._waiting.pop(record.request.uid)
        there = self._clock.now_ns + round(request.prompt_tokens * self._transfer_ns_per_token)
        self._clock.alarm(there, Rank.ARRIVE, lambda _: self.decode.enter(request))

    def _left(self, record: RequestRecord) -> None:
        if self.on_leave is not None:
            self.on_leave(record)


class LoadedPrompts:
    """The cost of steps whose prompts were computed elsewhere: each only generates its token."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def step_ns(self, shape: StepShape) -> int:
        lengths = [tokens + prefix for tokens, prefix in shape.prefills]
        return self._cost.step_ns(
            StepShape(
                num_decodes=shape.num_decodes + len(lengths),
                decode_context=shape.decode_context + sum(lengths),
                decode_context_sq=shape.decode_context_sq + sum(n * n for n in lengths),
                prefills=(),
                num_sampled=shape.num_sampled,
            )
        )

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        return self._cost.decode_run_ns(num_decodes, decode_context, decode_context_sq, n)

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        steps, length = len(shapes.num_decodes), shapes.chunk_tokens + shapes.chunk_prefix

        def per_step(weights: IntArray) -> IntArray:
            sums = np.bincount(shapes.chunk_step, weights=weights, minlength=steps)
            return sums.astype(np.int64)

        decodes = shapes.num_decodes + per_step(np.ones_like(length))
        none = np.zeros(0, dtype=np.int64)
        return self._cost.parts_s(
            StepShapes(
                num_decodes=decodes,
                decode_tokens=decodes,
                decode_context=shapes.decode_context + per_step(length),
                decode_context_sq=shapes.decode_context_sq + per_step(length * length),
                num_sampled=shapes.num_sampled,
                num_tokens=decodes,
                chunk_step=none,
                chunk_tokens=none,
                chunk_prefix=none,
            )
        )

    def arrival_ns(self, prompt_tokens: int) -> int:
        return self._cost.arrival_ns(prompt_tokens)

    def delivery_ns(self, num_running: int) -> int:
        return self._cost.delivery_ns(num_running)

    def describe(self) -> dict[str, Any]:
        return self._cost.describe()
