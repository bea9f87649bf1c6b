"""What happened to every request, in columns: a trace of millions fits in memory."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from sim.engine.interface import RequestRecord, Status
from sim.request import Request

IntArray = npt.NDArray[np.int64]

STATUSES = tuple(Status)
_CODE = {status: code for code, status in enumerate(STATUSES)}

COLUMNS = (
    "uid",
    "replica",
    "status",
    "reason",
    "arrival_ns",
    "prompt_tokens",
    "wanted_tokens",
    "queued_ns",
    "first_scheduled_ns",
    "first_token_ns",
    "finish_ns",
    "output_tokens",
    "cached_tokens",
    "preemptions",
    "recomputed_tokens",
)
"""`status` indexes `STATUSES`, `reason` the record's `reasons`; `replica` -1 is none. `arrival_ns`
is the client's, the other times are the engine's (-1: never). `wanted_tokens` is the output the
request asked for, `output_tokens` what it got."""


class Records:
    """One row per request that left (or was drained), in order of leaving."""

    def __init__(self) -> None:
        self.reasons: list[str] = [""]
        self._reason_code = {"": 0}
        self._rows = array("q")

    def __len__(self) -> int:
        return len(self._rows) // len(COLUMNS)

    def add(self, record: RequestRecord, replica: int) -> None:
        """Append a request's row; `replica` -1 for one that was never sent to any."""
        request = record.request
        reason = self._reason_code.get(record.reason)
        if reason is None:
            reason = self._reason_code[record.reason] = len(self.reasons)
            self.reasons.append(record.reason)
        self._rows.extend(
            (
                request.uid,
                replica,
                _CODE[record.status],
                reason,
                request.arrival_ns,
                request.prompt_tokens,
                request.output_tokens,
                record.queued_ns,
                record.first_scheduled_ns,
                record.first_token_ns,
                record.finish_ns,
                record.output_tokens,
                record.cached_tokens,
                record.preemptions,
                record.recomputed_tokens,
            )
        )

    def extended(self, drained: list[tuple[RequestRecord, int]]) -> Records:
        """A copy with the rows of requests that are still inside; this one stays as it is."""
        copy = Records()
        copy.reasons = list(self.reasons)
        copy._reason_code = dict(self._reason_code)
        copy._rows = self._rows[:]
        for record, replica in drained:
            copy.add(record, replica)
        return copy

    def columns(self) -> dict[str, IntArray]:
        """`COLUMNS` -> values, sorted by uid."""
        if not self._rows:
            return {name: np.zeros(0, dtype=np.int64) for name in COLUMNS}
        # A view while the columns are copied one by one: the rows of a long trace are large.
        rows = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, len(COLUMNS))
        order = np.argsort(rows[:, 0], kind="stable")
        return {name: rows[order, i] for i, name in enumerate(COLUMNS)}


def unserved(request: Request, status: Status, reason: str, now: int) -> RequestRecord:
    """The record of a request that no engine has seen."""
    finish_ns = -1 if status is Status.UNFINISHED else now
    return RequestRecord(request, status, reason, finish_ns=finish_ns)
