"""Operator times inside real steps."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from calibrate.engine.clock import Clock
from calibrate.engine.executor import StepRecorder


class ClockRecorder:
    """For devices that finish each operator before the next is issued (the CPU)."""

    def __init__(self, clock: Clock) -> None:
        self.ns: defaultdict[str, int] = defaultdict(int)
        self._clock = clock
        self._last = 0

    def start(self) -> None:
        """Begin a step."""
        self.ns.clear()
        self._last = self._clock()

    def mark(self, operator: str) -> None:
        now = self._clock()
        self.ns[operator] += now - self._last
        self._last = now

    def finish(self) -> dict[str, int]:
        """Nanoseconds per operator since `start`."""
        return dict(self.ns)


class EventRecorder:
    """For a GPU: an event after each operator. Times are the device's, gaps while it waits for
    the host included; `prepare` is the host's time before the first launch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._pool: list[torch.cuda.Event] = []  # making an event costs more than recording it
        self._begin = 0
        self._prepare = 0

    def start(self) -> None:
        self._events.clear()
        torch.cuda.synchronize(self.device)
        self._begin = time.perf_counter_ns()

    def mark(self, operator: str) -> None:
        if operator == "prepare":
            self._prepare = time.perf_counter_ns() - self._begin
        if len(self._pool) == len(self._events):
            self._pool.append(torch.cuda.Event(enable_timing=True))
        event = self._pool[len(self._events)]
        event.record()
        self._events.append((operator, event))

    def finish(self) -> dict[str, int]:
        torch.cuda.synchronize(self.device)
        ns: defaultdict[str, int] = defaultdict(int)
        ns["prepare"] = self._prepare
        for (_, before), (operator, after) in zip(self._events, self._events[1:], strict=False):
            ns[operator] += round(before.elapsed_time(after) * 1e6)
        return dict(ns)


def recorder_for(device: torch.device, clock: Clock) -> StepRecorder:
    """The recorder of a device."""
    return EventRecorder(device) if device.type == "cuda" else ClockRecorder(clock)
