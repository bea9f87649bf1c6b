"""The fast engine: whole stretches of decode steps as one event."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from sim.cost.interface import CostModel, StepShape
from sim.engine.config import EngineConfig
from sim.engine.fast.foresight import Foresight
from sim.engine.fast.scheduler import FastScheduler
from sim.engine.fast.sequence import FastSequence
from sim.engine.fast.support import why_plain
from sim.engine.fast.timeline import Row, Stretch, Timeline
from sim.engine.intake import (
    allowed_outputs,
    check_servable,
    outputs_until_stop,
    why_rejected,
)
from sim.engine.interface import RequestRecord, Status
from sim.engine.log import StepLog
from sim.errors import UserError
from sim.protocols import EvictionPolicy, SchedulingPolicy
from sim.request import Request

UNFINISHED, COMPLETED = Status.UNFINISHED, Status.COMPLETED


class FastEngine:
    """One replica under vLLM V1's scheduler; the contract is `sim.engine.interface.Engine`.

    At an event (`advance`) the rows that ended are committed and the rows due are planned. When
    only decodes follow, the rows up to the next last token are foreseen in the same event: their
    ends are computed ahead, and taken up as if planned one by one when the next event comes. A
    submission or an abort before that takes back those not planned by then.
    """

    def __init__(
        self,
        config: EngineConfig,
        cost: CostModel,
        policy: SchedulingPolicy | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        """Raises UserError for what it cannot do; ask `why_plain` before."""
        reason = why_plain(config, policy, eviction)
        if reason is not None:
            raise UserError(f"the fast engine cannot do {reason}; use the plain one")
        check_servable(config)
        self.config = config
        self.log = StepLog()
        self.on_finish: Callable[[RequestRecord], None] = _ignore
        self._cost = cost
        self._policy = policy
        self._scheduler = FastScheduler(config, policy)
        self._timeline = Timeline(self.log, config.max_concurrent_batches)
        self._foresight = Foresight(self._scheduler, self._timeline, cost)
        self._inside: dict[int, FastSequence] = {}
        self._wake_ns: int | None = None
        self._now = 0
        self._planned_ns = 0  # when the scheduler was asked for a row last
        self._has_news = False  # somebody left since: it is asked although nobody is there
        self._surely_fits = 0  # tokens that cannot be too many, whatever the policy
        if policy is None or policy.watermark is None:
            capacity = config.num_usable_blocks * config.block_size
            self._surely_fits = min(config.max_model_len, capacity)
        self._scheduler.view.catch_up = self._catch_up
        self._scheduler.view.find = self._inside.get

    # -- Engine

    def submit(self, request: Request, now: int) -> None:
        self._now = now
        record = RequestRecord(request, UNFINISHED)
        record.queued_ns = now
        stop, overruns = request.output_tokens, False
        if request.prompt_tokens + stop > self._surely_fits or request.max_tokens is not None:
            config = self.config
            reason = why_rejected(config, request, self._policy)
            if reason is not None:
                record.status = Status.REJECTED
                record.reason = reason
                record.finish_ns = now
                self.on_finish(record)
                return
            stop = outputs_until_stop(config, request)
            room = config.max_model_len - request.prompt_tokens
            overruns = config.async_scheduling and stop < min(allowed_outputs(request), room)
        seq = FastSequence(request, record, stop or 1, overruns)
        self._inside[request.uid] = seq
        as_foreseen = self._scheduler.add(seq)
        if not self._timeline.ends:
            self._wake_ns = now
        elif as_foreseen:
            self._foresight.queue_one_more(now)
        else:
            self._cut(now)

    def abort(self, uid: int, now: int) -> None:
        self._now = now
        seq = self._inside.pop(uid, None)
        if seq is None:
            return
        timeline, scheduler = self._timeline, self._scheduler
        self._cut(now)
        self._settle(bisect_left(timeline.ends, now))
        timeline.lose_token(seq)
        self._note_progress(seq.record, seq)
        seq.record.status = Status.ABORTED
        seq.record.finish_ns = now
        scheduler.drop(seq)
        self._has_news = True
        if not timeline.ends:
            self._wake_ns = now  # as vLLM, which is asked for a step once more
        self.on_finish(seq.record)

    def wake_ns(self) -> int | None:
        return self._wake_ns

    def advance(self, now: int) -> None:
        self._now = now
        timeline, foresight, scheduler = self._timeline, self._foresight, self._scheduler
        ends = timeline.ends
        if ends:
            ended = bisect_left(ends, now)
            planned = ended + timeline.depth
            if planned <= len(ends):
                foresight.cut(planned)
            foresight.take_up(planned)
            timeline.commit(ended + 1)
            row = timeline.first - 1
            for seq in scheduler.commit(row):
                self._finish(seq, row, now)
                self._has_news = True
        self._plan_on(now)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    def kv_used_blocks(self, now: int) -> int:
        timeline, blocks = self._timeline, self._scheduler.blocks
        planned = bisect_left(timeline.ends, now) + timeline.depth
        if timeline.planned < planned <= len(timeline.ends):
            return timeline.used[planned - 1]
        self._foresight.take_up(planned)
        return blocks.num_blocks - blocks.free

    @property
    def num_blocks(self) -> int:
        return self._scheduler.blocks.num_blocks

    def drain(self, now: int | None = None) -> list[RequestRecord]:
        """As the contract says. Steps that ended by `now` (default: when it was called last) are
        in the log then; `now` is not after `wake_ns()`."""
        if now is None:
            now = self._now
        self._settle(bisect_right(self._timeline.ends, now))
        records = []
        for seq in self._inside.values():
            record = dataclasses.replace(seq.record)
            self._note_progress(record, seq)
            records.append(record)
        return records

    def check_integrity(self) -> None:
        """Raise AssertionError unless all books agree."""
        self._scheduler.check_integrity()
        self._timeline.check_integrity()

    # -- requests

    def _finish(self, seq: FastSequence, row: int, now: int) -> None:
        record = seq.record
        record.status = COMPLETED
        record.finish_ns = now
        record.output_tokens = seq.stop
        seq.end_span(row)
        record.token_spans = seq.spans
        del self._inside[seq.request.uid]
        self._scheduler.drop(seq)
        self.on_finish(record)

    def _note_progress(self, record: RequestRecord, seq: FastSequence) -> None:
        """Enter into the record what `seq` has received in the rows committed."""
        row = self._timeline.first - 1
        record.output_tokens = seq.tokens_until(row)
        spans = seq.spans
        if seq.span_start >= 0:
            spans = (*spans, (seq.span_start, seq.last_row))
        record.token_spans = tuple((first, min(last, row)) for first, last in spans if first <= row)
        if not record.output_tokens:
            record.first_token_ns = -1

    # -- rows

    def _cut(self, now: int) -> None:
        """Something changed: rows planned from `now` on will not be as foreseen."""
        timeline = self._timeline
        ends = timeline.ends
        if ends:
            ended = bisect_left(ends, now)
            self._wake_ns = ends[ended]
            if ended + timeline.depth <= len(ends):
                self._foresight.cut(ended + timeline.depth)

    def _catch_up(self) -> int:
        """Take up what has happened by now, for somebody who looks in between; when a row was
        planned last."""
        self._settle(bisect_left(self._timeline.ends, self._now))
        return self._planned_ns

    def _settle(self, ended: int) -> None:
        """The first `ended` rows are over, without a last token of anybody."""
        timeline = self._timeline
        self._foresight.take_up(ended + timeline.depth)
        if ended:
            timeline.commit(ended)
            self._scheduler.committed = timeline.first - 1
            self._planned_ns = timeline.last_end_ns

    def _plan_on(self, now: int) -> None:
        """Plan what is due now, and look ahead."""
        if self._has_news or self._inside:
            self._planned_ns = now
            self._has_news = False
        scheduler, timeline = self._scheduler, self._timeline
        ends, depth = timeline.ends, timeline.depth
        while True:
            if scheduler.is_steady():
                wake_ns = self._foresight.look_ahead(now)
                if wake_ns is not None:
                    self._wake_ns = wake_ns
                    return
            if len(ends) >= depth:
                break
            plan = scheduler.plan()
            if plan is not None:
                self._dispatch(plan, now)
            elif ends or not scheduler.num_preempted:
                break
        self._wake_ns = ends[0] if ends else None

    def _dispatch(self, plan: Stretch, now: int) -> None:
        """A row has been planned: when does it run?"""
        timeline, blocks = self._timeline, self._scheduler.blocks
        ends = timeline.ends
        start_ns = ends[-1] if ends else timeline.last_end_ns
        if start_ns < now:
            start_ns = now
        plan.start_ns = start_ns
        decodes = plan.num_decodes
        if isinstance(plan, Row):
            shape = StepShape(
                decodes, plan.context, plan.context_sq, plan.prefills, plan.num_sampled
            )
            end_ns = start_ns + self._cost.step_ns(shape)
            for seq in plan.admitted:
                seq.record.first_scheduled_ns = start_ns
            for seq in plan.completing:
                if seq.known == seq.prompt_tokens:
                    seq.record.first_token_ns = end_ns
        else:
            shape = StepShape(decodes, plan.context, plan.context_sq, (), decodes)
            end_ns = start_ns + self._cost.step_ns(shape)
        timeline.add(plan, end_ns, blocks.num_blocks - blocks.free)


def _ignore(record: RequestRecord) -> None:
    """Nobody wants to know."""
