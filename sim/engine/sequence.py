"""A request inside the engine: how far it is, and what it holds."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from sim.engine.intake import allowed_outputs
from sim.request import Request, Segment, output_key


class Stage(IntEnum):
    """Where a sequence stands with its scheduler."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class Sequence:
    """The scheduler's state of one request. Only scheduler and KV cache change it.

    Known tokens are the prompt and the outputs delivered so far. With steps in flight,
    `num_computed_tokens` counts what is scheduled, not what is done.
    """

    __slots__ = (
        "arrival",
        "block_names",
        "blocks",
        "id",
        "in_flight",
        "is_prefill_chunk",
        "max_length",
        "name_cursor",
        "next_decode",
        "num_computed_tokens",
        "num_drafts",
        "num_lost_tokens",
        "num_output_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_registered",
        "num_stale",
        "num_tokens",
        "order_key",
        "output_content",
        "priority",
        "prompt_tokens",
        "request",
        "stage",
        "stop_after",
        "text",
    )

    def __init__(
        self,
        request: Request,
        arrival: Any = None,
        output_content: int | None = None,
    ) -> None:
        """`arrival` breaks ties of priority (default: the request's, then its `uid`, so that no two
        are equal: with equal ones two sequences could preempt each other for ever).
        `output_content` is the content key of the generated tokens (default: by `uid`)."""
        self.request = request
        self.id = request.id
        self.priority = request.priority
        self.arrival = (request.arrival_ns, request.uid) if arrival is None else arrival
        self.prompt_tokens = request.prompt_tokens
        self.stop_after = request.output_tokens
        """Outputs after which it stops by itself: the engine learns it only when it happens."""
        self.max_length = request.prompt_tokens + allowed_outputs(request)
        """Prompt and the outputs the client allows: known from the start."""
        self.output_content = output_key(request.uid) if output_content is None else output_content

        self.stage = Stage.WAITING
        self.order_key: Any = None
        """Its key in a keyed waiting queue, from when it was queued last."""
        self.num_tokens = request.prompt_tokens
        """Known tokens."""
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        """Tokens whose KV is there or being computed, unverified drafts included."""
        self.num_drafts = 0
        """Draft tokens to verify in the next step."""
        self.num_placeholders = 0
        """Output tokens of steps in flight, at most (asynchronous scheduling)."""
        self.in_flight = 0
        """Tokens of steps whose output has not come."""
        self.num_stale = 0
        """Tokens in flight from before a preemption: their output counts, their KV is gone."""
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        """Tokens it had computed when it was preempted last."""
        self.next_decode = 0
        """Call of `schedule()` from which it may decode again (asynchronous pipelines)."""
        self.is_prefill_chunk = False
        """Its last schedule left known tokens uncomputed, so it samples nothing."""

        self.blocks: list[int] = []
        """Block table; 0 is the null block, for tokens that left the sliding window."""
        self.block_names: list[int] = []
        """Names (content hashes) of its full blocks, as far as tokens are known."""
        self.text: tuple[Segment, ...] = ()
        """The prompt's content, once something asked for it."""
        self.name_cursor: tuple[int, int] = (0, 0)
        """Where naming stopped: (piece of `text`, tokens of it already named)."""
        self.num_registered = 0
        """Leading blocks that are in the prefix cache, or were skipped there."""

    def __repr__(self) -> str:
        return (
            f"<{self.id} {self.stage.name.lower()} prompt {self.prompt_tokens}"
            f" out {self.num_output_tokens} computed {self.num_computed_tokens}>"
        )

    def output_text(self) -> Segment:
        """The content of the tokens generated so far."""
        return Segment(self.output_content, 0, self.num_output_tokens)

    @property
    def finished(self) -> bool:
        return self.stage is Stage.FINISHED
