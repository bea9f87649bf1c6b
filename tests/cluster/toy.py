"""A small engine with the real interface and no memory model, for tests of what is around it."""

from __future__ import annotations

from typing import Any

from sim.cluster.cluster import Cluster
from sim.cluster.records import STATUSES
from sim.engine.interface import RequestRecord, Status
from sim.engine.log import StepLog
from sim.request import Request


class ToyEngine:
    """Synchronous; a step gives every running request one token and takes `step_ns`.

    Up to `slots` requests run; requests longer than `longest` tokens are rejected.
    """

    num_blocks = 1000

    def __init__(self, step_ns: int = 10, slots: int = 4, longest: int = 1 << 30) -> None:
        self.step_ns, self.slots, self.longest = step_ns, slots, longest
        self.log = StepLog()
        self.on_finish = lambda record: None
        self.waiting: list[RequestRecord] = []
        self.running: list[RequestRecord] = []
        self.calls: list[tuple[int, str, int]] = []
        self._end: int | None = None
        self._start = 0
        self._due: int | None = None

    def submit(self, request: Request, now: int) -> None:
        self.calls.append((now, "submit", request.uid))
        record = RequestRecord(request, Status.UNFINISHED, queued_ns=now)
        if request.prompt_tokens > self.longest:
            record.status, record.reason, record.finish_ns = Status.REJECTED, "context", now
            self.on_finish(record)
            return
        self.waiting.append(record)
        if self._end is None:
            self._due = now

    def abort(self, uid: int, now: int) -> None:
        self.calls.append((now, "abort", uid))
        for queue in (self.waiting, self.running):
            for record in queue:
                if record.request.uid == uid:
                    queue.remove(record)
                    record.status, record.finish_ns = Status.ABORTED, now
                    self.on_finish(record)
                    return

    def wake_ns(self) -> int | None:
        return self._end if self._end is not None else self._due

    def advance(self, now: int) -> None:
        self.calls.append((now, "advance", len(self.running)))
        self._due = None
        if self._end is not None:
            self._end = None
            self._commit(now)
        while self.waiting and len(self.running) < self.slots:
            record = self.waiting.pop(0)
            record.first_scheduled_ns = now
            self.running.append(record)
        if self.running:
            self._start, self._end = now, now + self.step_ns

    def _commit(self, now: int) -> None:
        gaps = sum(r.output_tokens > 0 for r in self.running)
        n = len(self.running)
        self.log.add_step(self._start, now, n, len(self.waiting), n, n, n, n, (), n, 0, 0, n, gaps)
        for record in list(self.running):
            record.output_tokens += 1
            if record.output_tokens == 1:
                record.first_token_ns = now
            if record.output_tokens == record.request.output_tokens:
                self.running.remove(record)
                record.status, record.finish_ns = Status.COMPLETED, now
                self.on_finish(record)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def kv_used_blocks(self, now: int) -> int:
        return len(self.running)

    def drain(self, now: int | None = None) -> list[RequestRecord]:
        return self.running + self.waiting


def columns(cluster: Cluster) -> dict[str, list[Any]]:
    """The cluster's records as lists, with status and reason spelled out."""
    rows: dict[str, list[Any]] = {k: v.tolist() for k, v in cluster.records.columns().items()}
    rows["status"] = [STATUSES[code].value for code in rows["status"]]
    rows["reason"] = [cluster.records.reasons[code] for code in rows["reason"]]
    return rows
