"""Routing by the number of requests."""

from __future__ import annotations

from dataclasses import dataclass

from sim.protocols import ClusterView, RoutingPolicy
from sim.request import Request


@dataclass
class LeastRequests(RoutingPolicy):
    """The replica with the fewest requests that have not left it; the first of equals."""

    def choose(self, request: Request, view: ClusterView) -> int:
        held = view.num_requests
        return held.index(min(held))
