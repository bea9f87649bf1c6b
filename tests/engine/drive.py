"""Driving an engine by hand: stub costs, and a loop that obeys the engine's contract."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sim.cost.interface import StepShape, StepShapes
from sim.engine.interface import Engine, RequestRecord
from sim.request import Request


class StubCost:
    """A step costs `base` + `per_token` for each of its tokens, in ns."""

    def __init__(self, base: int = 1000, per_token: int = 10) -> None:
        self.base = base
        self.per_token = per_token

    def step_ns(self, shape: StepShape) -> int:
        return self.base + self.per_token * shape.num_tokens

    def decode_run_ns(self, num_decodes: int, context: int, context_sq: int, n: int) -> Any:
        return np.full(n, self.base + self.per_token * num_decodes, dtype=np.int64)

    def parts_s(self, shapes: StepShapes) -> dict[str, Any]:
        raise NotImplementedError

    def arrival_ns(self, prompt_tokens: int) -> int:
        return 0

    def delivery_ns(self, num_running: int) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {}


def request(uid: int, arrival_ns: int, prompt: int, output: int, **more: Any) -> Request:
    return Request(uid, f"r{uid:04d}", arrival_ns, prompt, output, **more)


def drive(
    engine: Engine, requests: Iterable[Request], aborts: Iterable[tuple[int, int]] = ()
) -> list[RequestRecord]:
    """Serve requests and aborts (ns, uid) to the end; records in the order of leaving."""
    records: list[RequestRecord] = []
    engine.on_finish = records.append
    events = [(r.arrival_ns, 0, i, r) for i, r in enumerate(requests)]
    events += [(ns, 1, i, uid) for i, (ns, uid) in enumerate(aborts)]  # type: ignore[misc]
    events.sort(key=lambda event: event[:3])
    place = 0
    while True:
        wake = engine.wake_ns()
        due = events[place][0] if place < len(events) else None
        if due is not None and (wake is None or due <= wake):
            now, is_abort, _, what = events[place]
            place += 1
            if is_abort:
                engine.abort(what, now)  # type: ignore[arg-type]
            else:
                engine.submit(what, now)
        elif wake is not None:
            engine.advance(wake)
        else:
            return records


def by_uid(records: Iterable[RequestRecord]) -> dict[int, RequestRecord]:
    return {record.request.uid: record for record in records}
