"""The load-generating client of an experiment, in front of a simulated cluster.

It sends the stages one after the other. A request goes out at its time, or when one of the client's
slots is free again, whichever is later; so a stage above capacity is a closed loop. Latencies count
from the moment a request is really sent, as these clients measure them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import simpy

from calibrate.validation.workloads import Load, StageLoad
from sim.cluster.clock import Clock, Rank
from sim.engine.interface import RequestRecord
from sim.request import Request


class Server(Protocol):
    """What a client needs of a cluster."""

    on_leave: Callable[[RequestRecord], None] | None

    def enter(self, request: Request) -> None: ...


@dataclass
class Client:
    """Sends `load` to `server`. Run `start()`, then the clock; `stage_of` says who is who."""

    clock: Clock
    server: Server
    load: Load
    stage_of: list[int] = field(default_factory=list)
    """Stage of each request, by uid."""

    def start(self) -> None:
        self._in_flight = 0
        self._wake: simpy.Event | None = None
        self.server.on_leave = self._left
        self.clock.env.process(self._run())

    def _run(self) -> Generator[simpy.Event, Any, None]:
        for number, stage in enumerate(self.load.stages):
            if stage.pause_ns:
                yield self.clock.alarm(self.clock.now_ns + stage.pause_ns, Rank.ARRIVE)
            yield from self._send(number, stage)
            while self._in_flight:
                yield self._someone_left()

    def _send(self, number: int, stage: StageLoad) -> Generator[simpy.Event, Any, None]:
        clock, load = self.clock, self.load
        lengths = [sum(s.length for s in prompt) for prompt in load.prompts]
        begin = clock.now_ns
        rows = zip(
            stage.offsets_ns.tolist(),
            stage.prompts.tolist(),
            stage.output_tokens.tolist(),
            strict=True,
        )
        for offset, prompt, output in rows:
            if begin + offset > clock.now_ns:
                yield clock.alarm(begin + offset, Rank.ARRIVE)
            while load.max_in_flight is not None and self._in_flight >= load.max_in_flight:
                yield self._someone_left()
            uid = len(self.stage_of)
            self.stage_of.append(number)
            self._in_flight += 1
            self.server.enter(
                Request(
                    uid=uid,
                    id=str(uid),
                    arrival_ns=clock.now_ns,
                    prompt_tokens=lengths[prompt],
                    output_tokens=output,
                    segments=load.prompts[prompt],
                )
            )

    def _someone_left(self) -> simpy.Event:
        self._wake = simpy.Event(self.clock.env)
        return self._wake

    def _left(self, _: RequestRecord) -> None:
        # Called inside the engine's step: what the client does about it comes in its own turn.
        self._in_flight -= 1
        if self._wake is not None:
            self.clock.alarm(self.clock.now_ns, Rank.ARRIVE, self._go_on)

    def _go_on(self, _: simpy.Event) -> None:
        if self._wake is not None:  # two may have left at this instant
            wake, self._wake = self._wake, None
            wake.succeed()
