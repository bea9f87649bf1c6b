"""Virtual time: integer nanoseconds on a SimPy environment, with a fixed order at one instant."""

from __future__ import annotations

from collections.abc import Callable

import simpy
from simpy.events import EventPriority


class Rank:
    """Who goes first at one instant: SimPy's event priorities, smallest first."""

    ARRIVE = EventPriority(1)
    ABORT = EventPriority(2)
    PLAN = EventPriority(3)
    STOP = EventPriority(4)


class Environment(simpy.Environment):
    """SimPy's, whose time is an integer here."""

    _now: int


class Alarm(simpy.Event):
    """A SimPy event that will certainly happen; cheaper than a Timeout and with a rank."""

    def __init__(self, env: simpy.Environment, callback: Callable[[simpy.Event], None] | None):
        self.env = env
        self.callbacks = [callback] if callback else []
        self._value = None
        self._ok = True


class Clock:
    """Sets alarms and runs them. Equal times and ranks ring in the order in which they were set."""

    def __init__(self) -> None:
        self.env = Environment(initial_time=0)
        self.num_events = 0
        """Alarms set so far."""

    @property
    def now_ns(self) -> int:
        return self.env._now

    def alarm(
        self,
        time_ns: int,
        rank: EventPriority,
        callback: Callable[[simpy.Event], None] | None = None,
    ) -> Alarm:
        """An alarm at `time_ns` (not before now): calls `callback`, resumes a process that yields
        it, or both."""
        env = self.env
        self.num_events += 1
        alarm = Alarm(env, callback)
        env.schedule(alarm, rank, time_ns - env._now)
        return alarm

    def run(self, until_ns: int | None = None) -> None:
        """Ring everything due up to and at `until_ns`, or until no alarm is left."""
        if until_ns is None:
            self.env.run()
        else:
            stop = self.alarm(until_ns, Rank.STOP)
            self.num_events -= 1
            self.env.run(stop)
