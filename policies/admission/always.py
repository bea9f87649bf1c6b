"""No admission control."""

from __future__ import annotations

from dataclasses import dataclass

from sim.protocols import Accept, AdmissionPolicy, ClusterView, Decision
from sim.request import Request


@dataclass
class Always(AdmissionPolicy):
    """Every request enters; under overload the queue grows without bound."""

    def decide(self, request: Request, view: ClusterView) -> Decision:
        return Accept()
