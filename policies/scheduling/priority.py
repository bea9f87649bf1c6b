"""vLLM V1's priority scheduling."""

from __future__ import annotations

from dataclasses import dataclass

from sim.protocols import RequestView, SchedulerView, SchedulingPolicy


@dataclass
class Priority(SchedulingPolicy):
    """As `chunked`, but the waiting request with the lowest `priority` number goes first and, when
    KV blocks run out, the running one with the highest is preempted. A better waiting request
    never displaces a running one.

    Source: vLLM 0.33.0, `scheduling_policy="priority"`.
    """

    order = "key"

    def key(self, request: RequestView, view: SchedulerView) -> int:
        return request.request.priority
