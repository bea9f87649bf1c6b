"""Virtual time: integer nanoseconds on a SimPy environment."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import EventPriority

from sim.cluster.alarm import Alarm, Rank

__all__ = ["Clock", "Rank"]


class Clock:
    """Sets alarms and runs them. Equal times and ranks ring in the order in which they were set."""

    def __init__(self) -> None:
        self.env: Any = simpy.Environment(initial_time=0)
        """SimPy's; its time is an integer here."""
        self.num_events = 0
        """Alarms set so far."""

    @property
    def now_ns(self) -> int:
        now: int = self.env._now
        return now

    def alarm(
        self,
        time_ns: int,
        rank: EventPriority,
        callback: Callable[[simpy.Event], None] | None = None,
    ) -> Alarm:
        """An alarm at `time_ns` (not before now): calls `callback`, resumes a process that yields
        it, or both."""
        self.num_events += 1
        env = self.env
        alarm = Alarm(env, callback)
        heappush(env._queue, (time_ns, rank, next(env._eid), alarm))
        return alarm

    def run(self, until_ns: int | None = None) -> None:
        """Ring everything due up to and at `until_ns`, or until no alarm is left."""
        # What SimPy's `run` does, in one loop instead of several calls for every event.
        env = self.env
        queue = env._queue
        while queue and (until_ns is None or queue[0][0] <= until_ns):
            env._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None
            for callback in callbacks:
                callback(event)
            if not event._ok and not hasattr(event, "_defused"):
                raise event._value  # what a process did not catch
        if until_ns is not None:
            env._now = until_ns
