"""The serving system as its clients see it: the door, the router, the replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import simpy

from sim.cluster.clock import Clock, Rank
from sim.cluster.records import Records, unserved
from sim.cluster.replica import NEVER, Replica
from sim.cost.interface import CostModel
from sim.engine.config import EngineConfig
from sim.engine.interface import Engine, RequestRecord, Status
from sim.errors import UserError
from sim.protocols import Accept, AdmissionPolicy, Defer, Reject, RoutingPolicy, overrides
from sim.request import Request

MOST_ASKED = 1_000_000
"""Times in a row that deferred requests may ask again: more is a policy in a loop."""


class Cluster:
    """Replicas behind one admission and one routing policy. It is its own `ClusterView`.

    A request enters at its arrival; the engine sees it `cost.arrival_ns` later. It may be turned
    away or held at the door. When it leaves, its row goes to `records` and `on_leave` is called,
    inside the engine's step: whoever wants to react submits through the clock.
    """

    def __init__(
        self,
        clock: Clock,
        engines: Sequence[Engine],
        config: EngineConfig,
        cost: CostModel,
        admission: AdmissionPolicy,
        routing: RoutingPolicy,
        timeout_ns: int | None = None,
    ) -> None:
        self.clock = clock
        self.records = Records()
        self._held_by = [0] * len(engines)  # per replica: requests sent there that have not left
        self.replicas = tuple(
            Replica(i, engine, config, clock, self._held_by) for i, engine in enumerate(engines)
        )
        for i, engine in enumerate(engines):
            engine.on_finish = partial(self._leave, i)
        self.num_entered = 0
        self.on_leave: Callable[[RequestRecord], None] | None = None
        self._cost = cost
        # A user's policy may answer anything: it is looked at before it is believed.
        self._decide: Callable[[Request, Cluster], Any] = admission.decide
        self._choose: Callable[[Request, Cluster], Any] = routing.choose
        self._told = [p.on_leave for p in (admission, routing) if overrides(p, "on_leave")]
        self._admission_name = type(admission).__name__
        self._routing_name = type(routing).__name__
        self._timeout_ns = timeout_ns
        self._where: dict[int, int] = {}  # uid -> replica, from routing to leaving
        self._travelling: dict[int, Request] = {}  # routed, not at its engine yet
        self._held: dict[int, Request] = {}  # deferred at the door
        self._held_until_leave: deque[Request] = deque()
        self._abort_reasons: dict[int, str] = {}
        self._asked = 0  # times that deferred requests asked again since anybody was let in or left

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns

    @property
    def num_requests(self) -> tuple[int, ...]:
        return tuple(self._held_by)

    def __contains__(self, uid: int) -> bool:
        """Is the request inside, or held at the door?"""
        return uid in self._where or uid in self._held

    def enter(self, request: Request) -> None:
        """`request` knocks, now; `now` is its arrival."""
        self.num_entered += 1
        if self._timeout_ns is not None:
            late = request.arrival_ns + self._timeout_ns
            self.clock.alarm(late, Rank.ABORT, lambda _: self.abort(request.uid, "timeout"))
        self._ask(request)

    def abort(self, uid: int, reason: str = "client") -> None:
        """The client gives up; nothing happens when the request has left already."""
        if uid in self._held:
            request = self._held.pop(uid)
            self.records.add(unserved(request, Status.ABORTED, reason, self.now_ns), -1)
        elif uid in self._travelling:
            self._abort_reasons[uid] = reason
        elif uid in self._where:
            self._abort_reasons[uid] = reason
            self.replicas[self._where[uid]].abort(uid)

    def inside(self) -> list[tuple[RequestRecord, int]]:
        """(record so far, replica) of every request that entered and has not left."""
        now = self.now_ns
        found = [(record, r.index) for r in self.replicas for record in r.engine.drain(now)]
        for uid, request in self._travelling.items():
            found.append((unserved(request, Status.UNFINISHED, "", now), self._where[uid]))
        for request in self._held.values():
            found.append((unserved(request, Status.UNFINISHED, "deferred", now), -1))
        return found

    # -- the door

    def _ask(self, request: Request) -> None:
        decision = self._decide(request, self)
        if isinstance(decision, Accept):
            self._route(request)
        elif isinstance(decision, Reject) and _is_reason(decision):
            self.records.add(unserved(request, Status.REJECTED, decision.reason, self.now_ns), -1)
        elif isinstance(decision, Defer):
            self._held[request.uid] = request
            self._hold(request, decision)
        else:
            raise UserError(
                f"admission policy {self._admission_name} decided {decision!r} for request "
                f'{request.id}; it must be Accept(), Reject("a reason") or Defer()'
            )

    def _hold(self, request: Request, defer: Any) -> None:
        until_ns = defer.until_ns
        if until_ns is None:
            self._held_until_leave.append(request)
        elif isinstance(until_ns, int | np.integer) and self.now_ns < until_ns < NEVER:
            self.clock.alarm(int(until_ns), Rank.ARRIVE, partial(self._ask_again, request))
        else:
            raise UserError(
                f"admission policy {self._admission_name} deferred request {request.id} until "
                f"{until_ns!r} ns, no whole number or not later than now ({self.now_ns} ns)"
            )

    def _ask_again(self, request: Request, _: simpy.Event) -> None:
        if self._held.pop(request.uid, None) is None:
            return  # its client gave up meanwhile
        self._asked += 1
        if self._asked > MOST_ASKED:
            raise UserError(
                f"admission policy {self._admission_name} deferred requests {MOST_ASKED:,} times "
                f"in a row, until {self.now_ns} ns; defer for longer, or Defer() until one leaves"
            )
        self._ask(request)

    def _ask_the_waiting(self, event: simpy.Event) -> None:
        """Someone left: those who wait for that are asked again, in order of arrival."""
        waiting, self._held_until_leave = self._held_until_leave, deque()
        for request in waiting:
            self._ask_again(request, event)

    # -- on the way to a replica, and out

    def _route(self, request: Request) -> None:
        chosen = self._choose(request, self)
        if not isinstance(chosen, int | np.integer) or not 0 <= chosen < len(self.replicas):
            raise UserError(
                f"routing policy {self._routing_name} chose replica {chosen!r} for request "
                f"{request.id}; there are {len(self.replicas)}, numbered from 0"
            )
        index = int(chosen)
        self._asked = 0
        self._held_by[index] += 1
        self._where[request.uid] = index
        delay = self._cost.arrival_ns(request.prompt_tokens)
        if delay:
            self._travelling[request.uid] = request
            now = self.clock.env._now
            self.clock.alarm(now + delay, Rank.ARRIVE, partial(self._reach, request))
        else:
            self.replicas[index].submit(request)

    def _reach(self, request: Request, _: simpy.Event) -> None:
        uid = request.uid
        del self._travelling[uid]
        if uid in self._abort_reasons:  # given up on the way: the engine never works on it
            self._leave(self._where[uid], unserved(request, Status.ABORTED, "", self.now_ns))
        else:
            self.replicas[self._where[uid]].submit(request)

    def _leave(self, index: int, record: RequestRecord) -> None:
        uid = record.request.uid
        del self._where[uid]
        self._asked = 0
        self._held_by[index] -= 1
        if self._abort_reasons:
            reason = self._abort_reasons.pop(uid, None)
            if reason is not None and record.status is Status.ABORTED:
                record.reason = reason
        self.records.add(record, index)
        for tell in self._told:
            tell(record.request, index)
        if self._held_until_leave:
            self.clock.alarm(self.now_ns, Rank.ARRIVE, self._ask_the_waiting)
        if self.on_leave is not None:
            self.on_leave(record)


def _is_reason(reject: Any) -> bool:
    return isinstance(reject.reason, str) and reject.reason != ""
