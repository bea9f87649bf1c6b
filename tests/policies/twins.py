"""Policies that do legal but unhelpful things. The simulator must keep its books all the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.protocols import (
    Accept,
    AdmissionPolicy,
    BlockView,
    ClusterView,
    Decision,
    Defer,
    EvictionPolicy,
    Reject,
    RequestView,
    RoutingPolicy,
    SchedulerView,
    SchedulingPolicy,
)
from sim.request import Request


class StarveLast(SchedulingPolicy):
    """One tenant is served only when nobody else wants to be."""

    order = "key"

    def key(self, request: RequestView, view: SchedulerView) -> Any:
        return (request.request.tenant == "t0", request.request.uid)


class NewestFirst(SchedulingPolicy):
    order = "key"

    def key(self, request: RequestView, view: SchedulerView) -> Any:
        return -request.request.arrival_ns


class MostRecent(EvictionPolicy):
    """Evicts what was used last, the worst choice for sharing."""

    def order(self, block: BlockView) -> Any:
        return -block.freed_seq


class RejectAll(AdmissionPolicy):
    def decide(self, request: Request, view: ClusterView) -> Decision:
        return Reject("all")


class DeferAll(AdmissionPolicy):
    def decide(self, request: Request, view: ClusterView) -> Decision:
        return Defer()


class OneByOne(AdmissionPolicy):
    def decide(self, request: Request, view: ClusterView) -> Decision:
        return Accept() if sum(view.num_requests) == 0 else Defer()


class AlwaysFirst(RoutingPolicy):
    def choose(self, request: Request, view: ClusterView) -> int:
        return 0


class Random(RoutingPolicy):
    def prepare(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, request: Request, view: ClusterView) -> int:
        return int(self._rng.integers(len(view.replicas)))
