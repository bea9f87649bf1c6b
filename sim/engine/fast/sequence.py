"""A request inside the fast engine."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from sim.engine.interface import RequestRecord
from sim.request import Request

if TYPE_CHECKING:
    from sim.engine.fast.extents import Extent
    from sim.engine.fast.lines import Path


class Stage(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Queued: new, or preempted."""
    PREFILL = "prefill"
    """Admitted; some known tokens are not scheduled yet."""
    DECODE = "decode"
    """In the cohort: one token in every step."""
    DRAINING = "draining"
    """Its last token is scheduled and not delivered yet; it keeps its slot and its blocks."""
    GONE = "gone"


# Names of their own: looking a member up in its class takes Python 3.11 longer than using it.
WAITING, PREFILL, DECODE, DRAINING, GONE = Stage


class FastSequence:
    """Progress of one request. Steps are called by their row in the step log.

    While decoding nothing is counted per step: in row `r` its context (computed tokens + 1) is
    `offset + r`, and it has had a token in every row since `span_start`.
    """

    __slots__ = (
        "admission",
        "computed",
        "extents",
        "held",
        "known",
        "last_row",
        "lengths",
        "offset",
        "order_key",
        "overruns",
        "path",
        "prompt_tokens",
        "record",
        "registered",
        "request",
        "span_start",
        "spans",
        "stage",
        "stop",
        "tail",
        "was_computed",
    )

    order_key: Any
    """Its place in a keyed queue; set when it is queued."""

    # Set on admission.
    admission: int
    """Number of its (last) admission: the order of vLLM's `running` list."""
    computed: int
    """Known tokens scheduled so far. Not updated while decoding."""
    held: int
    """Blocks in its table. Not updated while decoding."""

    # Set when its prefill is complete.
    offset: int
    last_row: int
    """Row of its last token."""

    was_computed: int
    """Tokens that were computed when it was preempted."""

    # Set when it is looked up in the prefix cache.
    extents: list[Extent]
    """Its cached blocks, first to last; `lengths[i]` blocks from the start of `extents[i]` (which
    may have been split since)."""
    lengths: list[int]
    tail: Extent | None
    """The extent it registered last."""
    registered: int
    """Leading blocks that are in the cache."""

    def __init__(self, request: Request, record: RequestRecord, stop: int, overruns: bool) -> None:
        self.request = request
        self.record = record
        self.stop = stop
        """Output tokens at which it finishes."""
        self.overruns = overruns
        """The scheduler cannot foresee its end: with steps in flight it gets one row more, whose
        token is dropped."""
        self.stage = WAITING
        self.prompt_tokens = request.prompt_tokens
        self.known = request.prompt_tokens
        """Known tokens when it was queued (again): what its prefill computes. While decoding: a
        lower bound of the tokens registered in the prefix cache."""
        self.span_start = -1
        """First row of the token run it is in; -1 outside of one."""
        self.spans: tuple[tuple[int, int], ...] = ()
        """Finished token runs: (first row, last row)."""
        self.path: Path | None = None
        """Where its text lies among those in the prefix cache."""

    def __repr__(self) -> str:
        return f"<{self.request.id} {self.stage.value} known {self.known}>"

    def has_token(self, row: int) -> bool:
        """Whether a planned row brings it a token."""
        return 0 <= self.span_start <= row <= self.last_row or any(
            first <= row <= last for first, last in self.spans
        )

    def end_span(self, row: int) -> None:
        """The token run it is in, if any, ended with `row` (or before it began)."""
        if 0 <= self.span_start <= row:
            self.spans = (*self.spans, (self.span_start, row))
        self.span_start = -1

    def tokens_until(self, row: int) -> int:
        """Tokens it has had in rows up to and including `row`."""
        count = sum(min(last, row) - first + 1 for first, last in self.spans if first <= row)
        if 0 <= self.span_start <= row:
            count += min(row, self.last_row) - self.span_start + 1
        return count
