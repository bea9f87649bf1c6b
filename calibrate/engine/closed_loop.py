"""One replica without a cluster: a trace through the plain engine, on any executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from calibrate.engine.executor import OutOfMemory
from sim.cost.interface import CostModel, StepShape
from sim.engine.config import EngineConfig
from sim.engine.executor import Executor, StepOutcome
from sim.engine.interface import RequestRecord
from sim.engine.log import StepLog
from sim.engine.plain import PlainEngine
from sim.engine.plan import StepPlan
from sim.request import Request


@dataclass
class Served:
    """What became of a trace."""

    records: list[RequestRecord] = field(default_factory=list)
    """Of all requests, in the order in which they left."""
    decisions: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    """Per step, (request uid, tokens) in schedule order."""
    log: StepLog = field(default_factory=StepLog)
    failure: str = ""
    """Why the run ended early; empty when it did not."""


class VirtualTime:
    """The time of the run in progress, for executors that want to know it."""

    def __init__(self) -> None:
        self.now_ns = 0


@dataclass
class Watched:
    """An executor that notes every decision."""

    inner: Executor
    decisions: list[tuple[tuple[int, int], ...]]

    def execute(self, plan: StepPlan, shape: StepShape) -> StepOutcome:
        self.decisions.append(
            tuple((s.request.uid, n) for s, n in zip(plan.seqs, plan.num_tokens, strict=True))
        )
        return self.inner.execute(plan, shape)


@dataclass
class Modelled:
    """Durations of a cost model, stretched by how slow the machine is at that time."""

    cost: CostModel
    time: VirtualTime
    slowness: Callable[[int, StepShape], float] | None = None
    """Factor on the duration of a step that begins at a time, nanoseconds."""

    def execute(self, plan: StepPlan, shape: StepShape) -> StepOutcome:
        ns = self.cost.step_ns(shape)
        if self.slowness is not None:
            ns = max(1, round(ns * self.slowness(self.time.now_ns, shape)))
        return StepOutcome((ns,), [int(s) for s in plan.samples])


@dataclass
class Scripted:
    """Given durations, one after the other; when they run out the last one is repeated."""

    durations_ns: Sequence[int]
    _next: int = 0

    def execute(self, plan: StepPlan, shape: StepShape) -> StepOutcome:
        at = min(self._next, len(self.durations_ns) - 1)
        self._next += 1
        return StepOutcome((self.durations_ns[at],), [int(s) for s in plan.samples])


def serve(
    requests: Iterable[Request],
    config: EngineConfig,
    cost: CostModel,
    executor: Executor,
    time: VirtualTime | None = None,
    progress: Callable[[int], None] | None = None,
) -> Served:
    """Send the requests (sorted by arrival) at their times and serve them to the end.

    An executor that runs out of memory ends the run; what was served until then is in the result,
    and the requests inside follow as unfinished.
    """
    served = Served()
    clock = time or VirtualTime()
    engine = PlainEngine(config, cost, executor=Watched(executor, served.decisions))
    served.log = engine.log
    done = 0

    def finish(record: RequestRecord) -> None:
        nonlocal done
        done += 1
        served.records.append(record)
        if progress is not None:
            progress(done)

    engine.on_finish = finish
    coming = iter(requests)
    arrival = next(coming, None)
    try:
        while True:
            wake = engine.wake_ns()
            if arrival is not None and (wake is None or arrival.arrival_ns <= wake):
                clock.now_ns = max(clock.now_ns, arrival.arrival_ns)
                engine.submit(arrival, clock.now_ns)
                arrival = next(coming, None)
            elif wake is not None:
                clock.now_ns = max(clock.now_ns, wake)
                # All arrivals of this instant come before planning.
                if arrival is None or arrival.arrival_ns > clock.now_ns:
                    engine.advance(clock.now_ns)
            else:
                break
    except OutOfMemory as error:
        served.failure = str(error)
        served.records.extend(engine.drain())
    return served
