"""Routing in turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.protocols import ClusterView, RoutingPolicy
from sim.request import Request


@dataclass
class RoundRobin(RoutingPolicy):
    """Replica 0, 1, 2, ... and from the start again, whatever their load."""

    _next: int = field(default=0, init=False)

    def choose(self, request: Request, view: ClusterView) -> int:
        index = self._next
        self._next = (index + 1) % len(view.replicas)
        return index
