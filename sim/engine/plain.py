"""The plain engine: vLLM's engine core on a virtual clock, one step at a time.

It walks lists and is the truth the fast engine is compared with; it also runs what only lists can
(speculation, pipelines, sliding windows, free-form policies) and drives the real engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sim.cost.interface import CostModel
from sim.engine.config import EngineConfig
from sim.engine.executor import Acceptance, Executor, ModelledExecutor, StepOutcome, step_shape
from sim.engine.intake import check_servable, why_rejected
from sim.engine.interface import RequestRecord, Status
from sim.engine.journal import Journal, Row
from sim.engine.plan import StepPlan
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence
from sim.engine.waste import WasteLog, kv_use
from sim.errors import UserError
from sim.protocols import EvictionPolicy, SchedulingPolicy
from sim.request import Request

BARREN_STEPS = 10_000
"""Steps without an output token after which the engine checks that it is getting anywhere."""


@dataclass(slots=True)
class StepInFlight:
    """A planned step until its output comes, at `end_ns`."""

    plan: StepPlan
    end_ns: int
    outcome: StepOutcome | None = None
    """None for an empty plan, which takes a place in the queue and no time."""
    row: Row | None = None


class Pipeline:
    """When each stage is free. A step enters a stage when it has left the one before, and the
    step before it has left this one."""

    def __init__(self, num_stages: int) -> None:
        self._free_ns = [0] * num_stages

    @property
    def end_ns(self) -> int:
        """When the last step leaves the last stage."""
        return self._free_ns[-1]

    def enter(self, now: int, stages_ns: tuple[int, ...]) -> tuple[int, int]:
        """Send a step through; when it starts and when it ends."""
        start = end = max(now, self._free_ns[0])
        for stage, duration in enumerate(stages_ns):
            end = max(end, self._free_ns[stage]) + duration
            self._free_ns[stage] = end
        return start, end


class PlainEngine:
    """One replica; the contract is `sim.engine.interface.Engine`.

    Up to `config.max_concurrent_batches` steps are in flight: planned one after the other, before
    the output of the earlier ones is known. Synchronous: 1; asynchronous: 2; with pipeline
    parallelism as many as there are stages, asynchronous one more.
    """

    def __init__(
        self,
        config: EngineConfig,
        cost: CostModel,
        policy: SchedulingPolicy | None = None,
        eviction: EvictionPolicy | None = None,
        *,
        executor: Executor | None = None,
        acceptance: Acceptance | None = None,
        track_waste: bool = False,
    ) -> None:
        """`executor` replaces the modelled one (then `acceptance`, which says how many drafts are
        accepted, is not asked). `track_waste` fills `waste`, a row per step."""
        check_servable(config)
        self.config = config
        self.scheduler = Scheduler(config, policy, eviction)
        self._policy = policy
        self.on_finish: Callable[[RequestRecord], None] = _ignore
        self._executor: Executor = executor or ModelledExecutor(config, cost, acceptance)
        self._journal = Journal()
        self.log = self._journal.log
        self.waste = WasteLog() if track_waste else None
        """Where KV memory went; rows of steps in flight are there already."""
        self._depth = config.max_concurrent_batches
        self._pipeline = Pipeline(config.pipeline_parallel_size)
        self._in_flight: deque[StepInFlight] = deque()
        self._now = 0
        self._preempted_before = 0  # by empty schedules since the last row
        self._barren = self._idle = 0

    # -- Engine

    def submit(self, request: Request, now: int) -> None:
        self._now = now
        reason = why_rejected(self.config, request, self._policy)
        if reason is not None:
            self.on_finish(RequestRecord(request, Status.REJECTED, reason, now, finish_ns=now))
            return
        seq = Sequence(request)
        self._journal.enter(seq, now)
        self.scheduler.add(seq)

    def abort(self, uid: int, now: int) -> None:
        self._now = now
        life = self._journal.by_uid.get(uid)
        if life is not None:
            self.scheduler.abort(life.seq)
            self.on_finish(self._journal.leave(life.seq, Status.ABORTED, now))

    def wake_ns(self) -> int | None:
        if self._in_flight:
            return self._in_flight[0].end_ns
        return self._now if self.scheduler.has_work else None

    def advance(self, now: int) -> None:
        self._now = now
        if self._in_flight and self._in_flight[0].end_ns <= now:
            self._commit(self._in_flight.popleft())
        while True:
            while len(self._in_flight) < self._depth and self.scheduler.has_work:
                self._plan(now)
            # An empty step at the head is over as soon as it is reached.
            if not self._in_flight or self._in_flight[0].end_ns > now:
                return
            self._commit(self._in_flight.popleft())

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    def kv_used_blocks(self, now: int) -> int:
        return self.scheduler.cache.pool.num_used

    @property
    def num_blocks(self) -> int:
        return self.config.num_usable_blocks

    def drain(self, now: int | None = None) -> list[RequestRecord]:
        return self._journal.unfinished()

    # -- steps

    def _plan(self, now: int) -> None:
        """Plan a step and send it off."""
        scheduler = self.scheduler
        had_work = scheduler.has_unfinished
        scheduler.view.now_ns = now
        plan = scheduler.schedule()
        if not plan:
            self._preempted_before += len(plan.preempted)
            if had_work:
                self._count_idle(plan)
            if self._depth > 1:
                self._in_flight.append(StepInFlight(plan, max(now, self._pipeline.end_ns)))
            return
        shape = step_shape(plan)
        outcome = self._executor.execute(plan, shape)
        start_ns, end_ns = self._pipeline.enter(self._ready_ns(plan), tuple(outcome.stages_ns))
        row = Row(
            start_ns,
            end_ns,
            shape,
            scheduler.num_running,
            scheduler.num_waiting,
            self._journal.admitted(plan, start_ns),
            len(plan.preempted) + self._preempted_before,
            scheduler.cache.pool.num_used,
        )
        if self.waste is not None:
            self.waste.add(kv_use(scheduler))
        self._preempted_before = self._idle = 0
        self._in_flight.append(StepInFlight(plan, end_ns, outcome, row))

    def _ready_ns(self, plan: StepPlan) -> int:
        """When the first stage can start: with asynchronous scheduling a plan may hold decodes
        whose newest token a later stage has still to sample."""
        if self.config.pipeline_parallel_size > 1 and self.config.async_scheduling:
            for step in reversed(self._in_flight):
                sampling = zip(step.plan.seqs, step.plan.samples, strict=True)
                if not {seq for seq, samples in sampling if samples}.isdisjoint(plan.seqs):
                    return max(self._now, step.end_ns)
        return self._now

    def _commit(self, step: StepInFlight) -> None:
        """Take in the output of the oldest step in flight."""
        if step.outcome is None or step.row is None:
            return
        result = self.scheduler.update(step.plan, step.outcome.sampled)
        if step.outcome.drafts is not None:
            self.scheduler.update_drafts(step.plan, step.outcome.drafts)
        self._journal.commit(step.row, step.plan, result.new_tokens)
        for seq in result.finished:
            self.on_finish(self._journal.leave(seq, Status.COMPLETED, step.end_ns))
        if any(result.new_tokens):
            self._barren = 0
        else:
            self._count_barren()

    def _count_barren(self) -> None:
        """No hang: an engine that has work and gets nowhere is an error of ours, so say so."""
        self._barren += 1
        if self._barren % BARREN_STEPS == 0:
            present = [*self.scheduler.waiting, *self.scheduler.running]
            if self._barren > 100 * sum(seq.num_tokens for seq in present) + BARREN_STEPS:
                raise self._stuck("generates nothing for too many steps")

    def _count_idle(self, plan: StepPlan) -> None:
        if plan.preempted or any(step.outcome for step in self._in_flight):
            self._idle = 0
            self._count_barren()
            return
        self._idle += 1
        if self._idle > self._depth + 2:
            raise self._stuck("plans nothing though requests wait")

    def _stuck(self, what: str) -> Exception:
        rules = self.scheduler.rules
        if rules.decides:
            return UserError(f"policy {rules.name} {what} ({self._state()})")
        return RuntimeError(f"internal error: the scheduler {what} ({self._state()})")

    def _state(self) -> str:
        scheduler = self.scheduler
        return (
            f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, "
            f"{scheduler.cache.num_free} of {self.num_blocks} KV blocks free at {self._now} ns"
        )


def _ignore(record: RequestRecord) -> None:
    pass
