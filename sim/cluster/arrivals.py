"""The open-loop client: the requests of a trace, at their times."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import simpy

from sim.cluster.clock import Clock, Rank
from sim.cluster.cluster import Cluster
from sim.request import Request, Trace

CHUNK = 2048
"""Rows turned from arrays into Python numbers at a time; a whole trace would not fit."""

PROGRESS = 256
"""Requests between two reports of progress."""

Progress = Callable[[int, int], None]
"""Called with (requests that arrived, requests in all), now and then."""


def arrivals(
    clock: Clock, cluster: Cluster, trace: Trace, progress: Progress | None = None
) -> Generator[simpy.Event, Any, None]:
    """SimPy process: every request of `trace` enters `cluster` at its arrival, in trace order."""
    now = clock.now_ns
    for done, request in enumerate(requests(trace)):
        if request.arrival_ns > now:
            now = request.arrival_ns
            yield clock.alarm(now, Rank.ARRIVE)
        cluster.enter(request)
        if progress is not None and done % PROGRESS == 0:
            progress(done, len(trace))
    if progress is not None:
        progress(len(trace), len(trace))


def requests(trace: Trace) -> Iterator[Request]:
    """The rows of `trace` as `Trace.request` makes them, a chunk of columns at a time."""
    segments, ids, tenant, session = trace.segments, trace.ids, trace.tenant, trace.session
    for low in range(0, len(trace), CHUNK):
        high = min(low + CHUNK, len(trace))
        arrival = trace.arrival_ns[low:high].tolist()
        prompt = trace.prompt_tokens[low:high].tolist()
        output = trace.output_tokens[low:high].tolist()
        priority = trace.priority[low:high].tolist() if trace.priority is not None else None
        for i in range(low, high):
            k = i - low
            yield Request(
                i,
                ids[i] if ids is not None else str(i),
                arrival[k],
                prompt[k],
                output[k],
                segments[i] if segments is not None else None,
                priority[k] if priority is not None else 0,
                tenant[i] if tenant is not None else "",
                session[i] if session is not None else "",
            )
