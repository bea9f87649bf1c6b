"""Admission by the length of the queue."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import UserError
from sim.protocols import Accept, AdmissionPolicy, ClusterView, Decision, Reject
from sim.request import Request


@dataclass
class QueueLimit(AdmissionPolicy):
    """Turns a request away when the replicas hold `max_requests` or more each, on average,
    waiting, running and on their way. The servers' own equivalent answers HTTP 503."""

    max_requests: int = 512
    """Requests in the system per replica."""

    def __post_init__(self) -> None:
        if self.max_requests < 1:
            raise UserError(f"queue-limit: max_requests must be >= 1, got {self.max_requests}")

    def decide(self, request: Request, view: ClusterView) -> Decision:
        held = view.num_requests
        if sum(held) >= self.max_requests * len(held):
            return Reject("queue-limit")
        return Accept()
