"""What a scheduling policy sees of the fast engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sim.engine.config import EngineConfig
from sim.engine.fast.sequence import PREFILL, WAITING, FastSequence
from sim.errors import UserError
from sim.protocols import RequestView
from sim.request import Request

if TYPE_CHECKING:
    from sim.engine.fast.scheduler import FastScheduler


class Snapshot(NamedTuple):
    """A `sim.protocols.RequestView` at one moment."""

    request: Request
    num_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int


class FastView:
    """A `sim.protocols.SchedulerView`. Policies look at it rarely (when a request is queued), so
    everything is worked out when asked for."""

    def __init__(self, scheduler: FastScheduler, config: EngineConfig) -> None:
        self.config = config
        self.catch_up: Callable[[], int] = _at_start
        """Takes up the rows planned by now; when the last row was planned."""
        self.find: Callable[[int], FastSequence | None] = _nobody
        """The sequence of a uid."""
        self._scheduler = scheduler

    @property
    def now_ns(self) -> int:
        return self.catch_up()

    @property
    def waiting(self) -> Sequence[Snapshot]:
        self.catch_up()
        return tuple(self.snapshot(seq) for seq in self._scheduler.waiting)

    @property
    def running(self) -> Sequence[Snapshot]:
        self.catch_up()
        return tuple(self.snapshot(seq) for seq in self._scheduler.running)

    @property
    def num_blocks(self) -> int:
        return self.config.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        self.catch_up()
        return self._scheduler.blocks.free

    def cached_tokens(self, request: RequestView) -> int:
        self.catch_up()
        return self._hit(self._sequence(request))[0] * self._scheduler.block_size

    def blocks_needed(self, request: RequestView, num_new_tokens: int) -> int:
        self.catch_up()
        scheduler, seq = self._scheduler, self._sequence(request)
        size = scheduler.block_size
        if seq.stage is not WAITING:
            tokens = self.snapshot(seq).num_computed_tokens + num_new_tokens
            held = scheduler.blocks_held(seq, scheduler.cohort.row)
            return max(-(-min(tokens, self.config.max_model_len) // size) - held, 0)
        num_hit, num_free = self._hit(seq)
        tokens = min(num_hit * size + num_new_tokens, self.config.max_model_len)
        return num_free + max(-(-tokens // size) - num_hit, 0)

    def _hit(self, seq: FastSequence) -> tuple[int, int]:
        """Blocks of its cached prefix, and how many of them nobody holds."""
        cache = self._scheduler.cache
        if cache is None:
            return 0, 0
        hit = cache.find_hit(seq, self.snapshot(seq).num_tokens)
        return sum(n for _, n in hit), sum(n for extent, n in hit if not extent.refs)

    def snapshot(self, seq: FastSequence) -> Snapshot:
        """`seq` as it is now."""
        scheduler = self._scheduler
        outputs = seq.tokens_until(scheduler.committed)
        if seq.stage is WAITING:
            computed = 0
        elif seq.stage is PREFILL:
            computed = seq.computed
        else:
            computed = seq.offset + min(scheduler.cohort.row - 1, seq.last_row)
        return Snapshot(
            seq.request, seq.prompt_tokens + outputs, computed, outputs, seq.record.preemptions
        )

    def _sequence(self, request: RequestView) -> FastSequence:
        seq = self.find(request.request.uid)
        if seq is None:
            raise UserError(f"{request!r} is not a request of this replica")
        return seq


def _at_start() -> int:
    return 0


def _nobody(uid: int) -> None:
    return None
