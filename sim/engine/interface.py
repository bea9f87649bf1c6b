"""One replica's engine on a virtual clock, as the cluster drives it.

Two engines implement this: the plain one walks lists, is exactly vLLM V1 and is the truth; the
fast one keeps decodes as cohorts and merges steps, and is proven equal to the plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sim.engine.log import StepLog
from sim.request import Request


class Status(StrEnum):
    """How a request left the engine."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    ABORTED = "aborted"
    UNFINISHED = "unfinished"


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request on one replica. Times in ns on the engine's clock, -1: never.

    `token_spans`: for each uninterrupted run of tokens, (index of the first step, index of the
    last step) in the replica's step log; one token per step unless speculation is on.
    """

    request: Request
    status: Status
    reason: str = ""
    queued_ns: int = -1
    first_scheduled_ns: int = -1
    """Start of the step in which it was first scheduled."""
    first_token_ns: int = -1
    finish_ns: int = -1
    """End of the step that produced its last token, or the time of abort or rejection."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prefix-cache hit at its first admission."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again because of preemption, hits not counted."""
    token_spans: tuple[tuple[int, int], ...] = ()


class Engine(Protocol):
    """Contract: calls come with non-decreasing `now`. At one instant the order is: submissions,
    aborts, then `advance`. `wake_ns` may move earlier after `submit` or `abort` (a merged run is
    cut at the end of its step in flight), so read it again after every call."""

    log: StepLog
    on_finish: Callable[[RequestRecord], None]
    """Called when a request leaves, at the engine's time of leaving (`finish_ns`) at the earliest
    and before anything later happens."""

    def submit(self, request: Request, now: int) -> None: ...

    def abort(self, uid: int, now: int) -> None: ...

    def wake_ns(self) -> int | None:
        """When `advance` must be called next; None: nothing to do until a submission."""
        ...

    def advance(self, now: int) -> None:
        """Do all that is due at `now` == `wake_ns()`: commit the step that ended, plan the next."""
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def kv_used_blocks(self, now: int) -> int: ...

    @property
    def num_blocks(self) -> int:
        """Usable KV blocks (vLLM's null block not counted)."""
        ...

    def drain(self, now: int | None = None) -> list[RequestRecord]:
        """Records of all requests still inside, as UNFINISHED, without changing anything. `now`
        (default: the time of the last call) may be later than that call, but all that was due
        before must have been done; steps that ended by then are in the log afterwards."""
        ...
