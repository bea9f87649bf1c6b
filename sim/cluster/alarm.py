"""What happens at a time: SimPy events, in a fixed order at one instant."""

from __future__ import annotations

from collections.abc import Callable

import simpy
from simpy.events import EventPriority


class Rank:
    """Who goes first at one instant: SimPy's event priorities, smallest first."""

    ARRIVE = EventPriority(1)
    ABORT = EventPriority(2)
    PLAN = EventPriority(3)


class Alarm(simpy.Event):
    """A SimPy event that will certainly happen; cheaper than a Timeout and with a rank."""

    _value = None
    _ok = True

    def __init__(self, env: simpy.Environment, callback: Callable[[simpy.Event], None] | None):
        self.env = env
        self.callbacks = [callback] if callback else []
