"""Which requests a capacity is measured on: like those of the run, in as few as possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from sim.metrics.capacity import MIN_WINDOW
from sim.metrics.distribution import IntArray
from sim.request import Request, Segment, Trace

IN_ORDER = 3000
"""Requests to measure where their order matters: a stretch of them differs from the whole."""
MOST = 50_000
"""Requests drawn at most."""
R2 = (0.7548776662466927, 0.5698402909980532)
"""1/g and 1/g^2, g the plastic number: the two-dimensional golden ratios."""


@dataclass
class Sample:
    """Requests for `saturate`, many of them, and how many to measure."""

    requests: Iterator[Request]
    window: int


def typical_requests(
    rows: Mapping[str, IntArray], trace: Trace | None, submitted: Mapping[int, Request]
) -> Sample:
    """Requests of a run (`rows` as `Records.columns()`), all arriving at time 0.

    Where requests may share text their order matters, and those that replica 0 got are taken as
    they came. Otherwise they are spread evenly over output and prompt lengths.
    """

    def known(uid: int) -> Request:
        if uid in submitted or trace is None:
            return submitted[uid]
        return trace.request(uid)

    if trace is None or trace.segments is not None:
        uids = rows["uid"][rows["replica"] == 0]
        uids = uids if len(uids) else rows["uid"]
        window = min(max(len(uids), MIN_WINDOW), IN_ORDER)
        in_order = _in_order([known(uid) for uid in uids.tolist()[: 2 * IN_ORDER]])
        return Sample(islice(in_order, MOST), window)
    spread = spread_evenly(rows["wanted_tokens"], rows["prompt_tokens"], MOST)
    uids = rows["uid"][spread]
    numbered = (
        replace(known(uid), uid=number, id=str(number), arrival_ns=0)
        for number, uid in enumerate(uids.tolist())
    )
    return Sample(numbered, MIN_WINDOW)


def _in_order(requests: list[Request]) -> Iterator[Request]:
    """The requests over and over; each time round, private texts are new and shared ones stay."""
    stride = 1 + max(request.uid for request in requests)
    shift = 0
    while True:
        for request in requests:
            uid = request.uid + shift
            segments = request.segments
            if segments is not None and shift:
                segments = tuple(_renamed(part, -2 * shift) for part in segments)
            yield replace(request, uid=uid, id=str(uid), arrival_ns=0, segments=segments)
        shift += stride


def _renamed(part: Segment, by: int) -> Segment:
    """Private texts have the negative keys of `prompt_key` and `output_key`."""
    return part if part.content >= 0 else part._replace(content=part.content + by)


def spread_evenly(first: IntArray, second: IntArray, count: int) -> IntArray:
    """Indices of `count` rows of which every stretch has the joint distribution of all rows.

    The rows are cut into strata by `first` and sorted by `second` within each; a low-discrepancy
    sequence (Roberts' R2) walks over both. A rate measured on a stretch is then far less noisy
    than one measured on as many consecutive rows.
    """
    n = len(first)
    strata = max(1, min(64, int(n**0.5)))
    stratum = np.empty(n, dtype=np.int64)
    stratum[np.argsort(first, kind="stable")] = np.arange(n) * strata // n
    order = np.lexsort((second, stratum))
    begin = np.searchsorted(stratum[order], np.arange(strata + 1))
    k = np.arange(count, dtype=np.float64)
    which = (k * R2[0] % 1.0 * strata).astype(np.int64)
    size = begin[which + 1] - begin[which]
    return order[begin[which] + (k * R2[1] % 1.0 * size).astype(np.int64)]
