"""One replica on the cluster's clock: an engine, and the alarm for its next step."""

from __future__ import annotations

import simpy

from sim.cluster.clock import Clock, Rank
from sim.engine.config import EngineConfig
from sim.engine.interface import Engine
from sim.request import Request

NEVER = 1 << 62


class Replica:
    """Drives its engine: the engine says when it must be woken, the clock wakes it.

    Alarms cannot be taken back, so a wake-up that moved leaves a stale alarm behind; it finds
    nothing due and does nothing.
    """

    __slots__ = ("_armed_ns", "_clock", "config", "engine", "held", "index")

    def __init__(
        self, index: int, engine: Engine, config: EngineConfig, clock: Clock, held: list[int]
    ) -> None:
        self.index = index
        self.engine = engine
        self.config = config
        self.held = held
        """Requests of every replica that have not left; shared with the cluster."""
        self._clock = clock
        self._armed_ns = NEVER  # the earliest alarm that is still to ring

    @property
    def num_requests(self) -> int:
        return self.held[self.index]

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def num_blocks(self) -> int:
        return self.engine.num_blocks

    @property
    def kv_usage(self) -> float:
        return self.engine.kv_used_blocks(self._clock.now_ns) / self.engine.num_blocks

    def submit(self, request: Request) -> None:
        self.engine.submit(request, self._clock.env._now)
        self._arm()

    def abort(self, uid: int) -> None:
        self.engine.abort(uid, self._clock.env._now)
        self._arm()

    def _arm(self) -> None:
        wake_ns = self.engine.wake_ns()
        if wake_ns is not None and wake_ns < self._armed_ns:
            self._armed_ns = wake_ns
            self._clock.alarm(wake_ns, Rank.PLAN, self._ring)

    def _ring(self, _: simpy.Event) -> None:
        now = self._clock.env._now
        if now == self._armed_ns:
            self._armed_ns = NEVER
        if self.engine.wake_ns() == now:
            self.engine.advance(now)
        self._arm()
