"""Takes an engine through a script of submissions, aborts and questions, as the cluster would."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from sim.engine.interface import Engine, RequestRecord
from sim.request import Request

SUBMIT, ABORT, ASK = range(3)


@dataclass
class Script:
    """What happens from outside, by virtual time."""

    requests: list[Request]
    """Submitted at their `arrival_ns`, in this order at one instant."""
    aborts: list[tuple[int, int]] = field(default_factory=list)
    """(time, uid)."""
    questions: list[int] = field(default_factory=list)
    """Times at which the cluster looks at the replica."""
    follow_ups: dict[int, tuple[int, Request]] = field(default_factory=dict)
    """uid -> (pause, request to submit that long after it left)."""
    until: int | None = None
    """Stop then."""


def run(engine: Engine, script: Script, check: bool = False) -> dict[str, Any]:
    """Everything one can see of the engine; `check` audits a FastEngine after every call."""
    events: list[tuple[int, int, int, Any]] = []
    number = 0
    for request in script.requests:
        events.append((request.arrival_ns, SUBMIT, number, request))
        number += 1
    for time, uid in script.aborts:
        events.append((time, ABORT, number, uid))
        number += 1
    for time in script.questions:
        events.append((time, ASK, number, None))
        number += 1
    heapify(events)
    left: list[tuple[Any, ...]] = []
    answers: list[tuple[Any, ...]] = []
    now = 0

    def on_finish(record: RequestRecord) -> None:
        nonlocal number
        left.append((now, *as_tuple(record)))
        follow_up = script.follow_ups.get(record.request.uid)
        if follow_up is not None:
            pause, request = follow_up
            request.arrival_ns = now + pause
            heappush(events, (request.arrival_ns, SUBMIT, number, request))
            number += 1

    engine.on_finish = on_finish
    while True:
        wake = engine.wake_ns()
        if events and (wake is None or events[0][0] <= wake):
            time, kind, _, subject = heappop(events)
            if script.until is not None and time > script.until:
                break
            now = time
            if kind == SUBMIT:
                engine.submit(subject, now)
            elif kind == ABORT:
                engine.abort(subject, now)
            else:
                used = engine.kv_used_blocks(now)
                inside = engine.drain(now - 1)  # what ends at this instant has not yet
                progress = sorted(as_tuple(record) for record in inside)
                answers.append((now, engine.num_running, engine.num_waiting, used, progress))
        elif wake is None or (script.until is not None and wake > script.until):
            break
        else:
            now = wake
            engine.advance(now)
        if check:
            engine.check_integrity()  # type: ignore[attr-defined]
    inside = engine.drain(script.until)
    table = engine.log.table()
    chunks = engine.log.chunks()
    long_gaps = engine.log.long_gaps()
    return {
        **{f"log {name}": column.tolist() for name, column in table.items()},
        "chunks": [column.tolist() for column in chunks],
        "long gaps": [column.tolist() for column in long_gaps],
        "zero gaps": engine.log.num_zero_gaps,
        "left": left,
        "inside": sorted(as_tuple(record) for record in inside),
        "answers": answers,
    }


def as_tuple(record: RequestRecord) -> tuple[Any, ...]:
    return (
        record.request.uid,
        record.status.value,
        record.reason,
        record.queued_ns,
        record.first_scheduled_ns,
        record.first_token_ns,
        record.finish_ns,
        record.output_tokens,
        record.cached_tokens,
        record.preemptions,
        record.recomputed_tokens,
        record.token_spans,
    )
