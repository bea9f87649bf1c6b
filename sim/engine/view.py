"""What a scheduling policy may look at."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from sim.engine.config import EngineConfig
from sim.engine.sequence import Sequence, Stage
from sim.errors import UserError
from sim.protocols import RequestView

if TYPE_CHECKING:
    from sim.engine.scheduler import Scheduler


class View:
    """A `sim.protocols.SchedulerView` of one scheduler. The engine keeps `now_ns` up to date."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.now_ns = 0

    @property
    def config(self) -> EngineConfig:
        return self._scheduler.config

    @property
    def waiting(self) -> Seq[Sequence]:
        return tuple(self._scheduler.waiting)

    @property
    def running(self) -> Seq[Sequence]:
        return tuple(self._scheduler.running)

    @property
    def num_blocks(self) -> int:
        return self._scheduler.config.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._scheduler.cache.num_free

    def cached_tokens(self, request: RequestView) -> int:
        cache = self._scheduler.cache
        return len(cache.find_hit(_sequence(request))) * cache.block_size

    def blocks_needed(self, request: RequestView, num_new_tokens: int) -> int:
        seq, cache = _sequence(request), self._scheduler.cache
        if seq.stage is Stage.RUNNING:
            return cache.missing_blocks(seq, num_new_tokens)
        hit = cache.find_hit(seq)
        return cache.admission_blocks(hit, len(hit) * cache.block_size + num_new_tokens)


def _sequence(request: RequestView) -> Sequence:
    if not isinstance(request, Sequence):
        raise UserError(f"{request!r} is not a request of this replica")
    return request
