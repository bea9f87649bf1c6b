"""Requests from Python are checked as those from files are: what cannot be served says why."""

from __future__ import annotations

from numbers import Integral

import numpy as np

from sim.errors import UserError
from sim.request import Request, Segment, Trace

MOST_TOKENS = (1 << 31) - 1
END_NS = 1 << 62
"""Where the clock ends: 146 years."""


def check_trace(trace: Trace) -> None:
    """UserError unless the columns are whole numbers in range, equally long and in order."""
    if not isinstance(trace, Trace):
        raise UserError(f"a trace is a sim.Trace (traces.load makes one), not {trace!r}")
    for name in ("arrival_ns", "prompt_tokens", "output_tokens", "priority"):
        column = getattr(trace, name)
        if column is None and name == "priority":
            continue
        if not (isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iu"):
            raise UserError(f"{trace.name}: {name} must be a numpy array of whole numbers")
    for name in (
        "prompt_tokens",
        "output_tokens",
        "priority",
        "segments",
        "ids",
        "tenant",
        "session",
    ):
        column = getattr(trace, name)
        if column is not None and len(column) != len(trace):
            raise UserError(f"{trace.name}: {len(column)} {name} of {len(trace)} requests")
    for name in ("prompt_tokens", "output_tokens"):
        column = getattr(trace, name)
        bad = np.flatnonzero((column < 1) | (column > MOST_TOKENS))
        if len(bad):
            row = int(bad[0])
            raise UserError(
                f"{trace.name}: {name}[{row}] is {column[row]}; it must be 1 to {MOST_TOKENS}"
            )
    arrival = trace.arrival_ns
    if len(arrival) and not 0 <= int(arrival.min()) <= int(arrival.max()) < END_NS:
        raise UserError(f"{trace.name}: arrival_ns must be at least 0 and below 2**62")
    late = np.flatnonzero(np.diff(arrival) < 0)
    if len(late):
        row = int(late[0]) + 1
        raise UserError(f"{trace.name}: arrival_ns[{row}] is earlier than the one before: sort it")


def check_request(request: Request) -> None:
    """UserError unless the numbers are whole and in range, and the segments make the prompt."""
    if not isinstance(request, Request):
        raise UserError(f"a request is a sim.Request, not {request!r}")
    bounds = {
        "uid": (0, END_NS),
        "arrival_ns": (0, END_NS),
        "prompt_tokens": (1, MOST_TOKENS),
        "output_tokens": (1, MOST_TOKENS),
        "priority": (-MOST_TOKENS, MOST_TOKENS),
    }
    if request.max_tokens is not None:
        bounds["max_tokens"] = (1, MOST_TOKENS)
    for name, (least, most) in bounds.items():
        value = getattr(request, name)
        if not isinstance(value, Integral) or not least <= int(value) <= most:
            raise UserError(
                f"request {request.id}: {name} must be a whole number of {least} to {most}, "
                f"not {value!r}"
            )
    if request.segments is None:
        return
    for segment in request.segments:
        if not isinstance(segment, Segment) or segment.start < 0 or segment.length < 1:
            raise UserError(f"request {request.id}: {segment!r} is no segment of a text")
    covered = sum(segment.length for segment in request.segments)
    if covered != request.prompt_tokens:
        raise UserError(
            f"request {request.id}: segments of {covered} tokens for a prompt of "
            f"{request.prompt_tokens}"
        )
