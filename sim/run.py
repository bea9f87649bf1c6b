"""From a scenario to a result: composes cost model, engines, policies, trace and cluster."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.cluster.arrivals import Progress, arrivals
from sim.cluster.clock import Clock, Rank
from sim.cluster.cluster import Cluster
from sim.cluster.records import STATUSES
from sim.cost.interface import StepShape
from sim.engine.interface import Engine, Status
from sim.errors import RunEnded, UserError
from sim.metrics.capacity import MIN_WINDOW, MOST_STEPS, TURNOVERS, Capacity, saturate
from sim.metrics.distribution import NS, IntArray
from sim.metrics.sample import typical_requests
from sim.protocols import AdmissionPolicy, RoutingPolicy
from sim.request import Request, Trace
from sim.request_check import check_request, check_trace
from sim.result import Result
from sim.scenario import Scenario
from sim.system import System, policy_of


def simulate(
    scenario: Scenario | None = None,
    *,
    trace: Trace | str | Path | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> Result:
    """Run a scenario to its end.

    `fields` are the scenario's, as in its YAML file, instead of or on top of `scenario`:
    `simulate(trace="azure.csv", policy="static")`. `trace` may also be a Trace, of which the
    scenario's `start_s`, `end_s`, `limit` and `rate_scale` take their part. Raises UserError.
    """
    if trace is not None and not isinstance(trace, Trace):
        fields["trace"] = trace
        trace = None
    if scenario is None:
        scenario = Scenario.of(**fields)
    elif not isinstance(scenario, Scenario):
        raise UserError(f"simulate() takes a Scenario, or fields by name; not {scenario!r}")
    elif fields:
        scenario = scenario.with_(fields)
    if trace is not None and (scenario.trace is not None or scenario.generate is not None):
        raise UserError("simulate() got a Trace and a scenario that names its requests: leave one")
    simulation = Simulation(scenario)  # first: it finds wrong names before a long trace is read
    requests = load_trace(scenario) if trace is None else _part_of(trace, scenario)
    simulation.serve(requests, progress)
    simulation.run()
    return simulation.result()


def load_trace(scenario: Scenario) -> Trace:
    """The requests of a scenario: its file, or the workload it generates."""
    import traces

    if scenario.trace is not None:
        source = scenario.trace
        return traces.load(
            source.path,
            format=source.format,
            columns=source.columns,
            skip_bad_rows=source.skip_bad_rows,
            arrivals=source.arrivals,
            limit=scenario.limit,
            start_s=scenario.start_s,
            end_s=scenario.end_s,
            rate_scale=scenario.rate_scale,
            seed=scenario.seed,
        )
    if scenario.generate is None:
        raise UserError("no requests: give a trace file (--trace FILE) or a workload (--generate)")
    return _part_of(traces.generate(scenario.generate, scenario.seed), scenario)


def _part_of(trace: Trace, scenario: Scenario) -> Trace:
    """What the scenario takes of it, at the scenario's rate."""
    import traces

    if scenario.start_s is not None or scenario.end_s is not None:
        trace = traces.window(trace, scenario.start_s, scenario.end_s)
    if scenario.limit is not None:
        trace = traces.limit(trace, scenario.limit)
    return traces.scale_rate(trace, scenario.rate_scale)


class Simulation:
    """One run on a virtual clock. Raises UserError for names and settings that cannot be.

    `serve(trace)` and `run()` take a whole trace through. Without them the simulation is driven
    from outside: `submit(request)` and `advance(until_s)` in any order, `result()` at any time.
    """

    def __init__(self, scenario: Scenario, system: System | None = None) -> None:
        """`system` is the scenario's, where it is known already; its cost model may be another."""
        self.scenario = scenario
        admission: AdmissionPolicy = policy_of("admission", scenario.admission, scenario.seed, 0)
        routing: RoutingPolicy = policy_of("routing", scenario.routing, scenario.seed, 0)
        system = System.of(scenario) if system is None else system
        self.system = system
        self.trace: Trace | None = None
        self.clock = Clock()
        engines = self._engines()
        timeout_s = scenario.client.timeout_s
        self.cluster = Cluster(
            self.clock,
            engines,
            system.config,
            system.cost,
            admission,
            routing,
            None if timeout_s is None else round(timeout_s * NS),
        )
        self.wall_s = self.cpu_s = 0.0
        """Wall and CPU time spent in the event loop."""
        self._submitted: dict[int, Request] = {}
        self.ended_early = ""
        """Why the run could not go on (only the real engine runs out of memory)."""

    def _engines(self) -> list[Engine]:
        """One per replica; with `execute.device` the real engine runs their steps."""
        system, settings = self.system, self.scenario.execute
        replicas = range(self.scenario.cluster.replicas)
        if settings.device is None:
            return [system.engine(i) for i in replicas]
        try:
            from calibrate.engine.execute import Execution
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton"):
                raise
            raise UserError(
                f"--execute needs {error.name}: pip install 'tokentwin[kernels]'"
            ) from error
        execution = Execution(
            self.scenario.model,
            system.config,
            system.cost,
            device=settings.device,
            dtype=settings.dtype,
            draft_model=settings.draft_model or system.config.spec_model,
            seed=self.scenario.seed,
            now_ns=(lambda: self.clock.now_ns) if settings.wall_clock else None,
        )
        system.cost = execution.cost
        return [system.engine(i, executor=execution.executor(i)) for i in replicas]

    def serve(self, trace: Trace, progress: Progress | None = None) -> None:
        """Let the requests of `trace` arrive at their times. Once, and before anything else."""
        if self.trace is not None or self._submitted or self.clock.now_ns:
            raise UserError("a simulation serves one trace, from its very start")
        check_trace(trace)
        self.trace = trace
        self.clock.env.process(arrivals(self.clock, self.cluster, trace, progress))

    @property
    def now_s(self) -> float:
        return self.clock.now_ns / NS

    def submit(self, request: Request) -> None:
        """`request` will arrive at its `arrival_ns`, which must not be in the past. Its `uid`
        must be new: numbers from `len(trace)` on, when there is a trace."""
        check_request(request)
        now = self.clock.now_ns
        if request.arrival_ns < now:
            raise UserError(
                f"request {request.id} arrives at {request.arrival_ns} ns, before now ({now} ns)"
            )
        taken = request.uid in self._submitted
        if taken or (self.trace is not None and request.uid < len(self.trace)):
            raise UserError(f"request {request.id}: its uid {request.uid} is taken")
        self._submitted[request.uid] = request
        self.clock.alarm(request.arrival_ns, Rank.ARRIVE, lambda _: self.cluster.enter(request))

    def abort(self, uid: int) -> None:
        """The client of a request gives up now; nothing happens when it has left already."""
        self.clock.alarm(self.clock.now_ns, Rank.ABORT, lambda _: self.cluster.abort(uid))

    def advance(self, until_s: float) -> None:
        """Let time pass until `until_s`, everything due at that time included."""
        if not math.isfinite(until_s):
            raise UserError(f"cannot advance to {until_s} s: run() goes to the end")
        until_ns = round(until_s * NS)
        if until_ns < self.clock.now_ns:
            raise UserError(f"cannot advance to {until_s} s: it is {self.now_s} s already")
        self._run(until_ns)

    def run(self) -> None:
        """Let time pass until all is done, or until the scenario's horizon."""
        horizon_s = self.scenario.horizon_s
        self._run(None if horizon_s is None else round(horizon_s * NS))

    def _run(self, until_ns: int | None) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            self.clock.run(until_ns)
        except RunEnded as error:
            self.ended_early = str(error)
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu

    def result(self) -> Result:
        """What has happened so far; requests that are still inside count as unfinished."""
        cluster, system = self.cluster, self.system
        inside = cluster.inside()
        records = cluster.records.extended(inside) if inside else cluster.records
        rows = records.columns()
        logs = [r.engine.log for r in cluster.replicas]
        last = max(log.last_end_ns for log in logs)
        done_ns = max(last, int(rows["finish_ns"].max(initial=0)))
        return Result(
            scenario=self.scenario,
            trace=self.trace,
            submitted=self._submitted,
            rows=rows,
            reasons=records.reasons,
            logs=logs,
            wastes=[getattr(r.engine, "waste", None) for r in cluster.replicas],
            system=system,
            capacity=self._capacity(rows),
            end_ns=self.clock.now_ns if inside else done_ns,
            num_events=self.clock.num_events,
            wall_s=self.wall_s,
            cpu_s=self.cpu_s,
        )

    def _capacity(self, rows: dict[str, IntArray]) -> Capacity | None:
        """Measure what one replica can serve, on requests like those seen so far."""
        served = rows["status"] == STATUSES.index(Status.COMPLETED)
        if not self.scenario.capacity_probe or not served.any():
            return None
        if self.scenario.execute.device is not None:
            return None  # the cost model knows another device than the one that served
        system = self.system
        backlog = system.config.max_num_admitted_seqs
        sample = typical_requests(rows, self.trace, self._submitted)
        # A copy: the cost model counts its extrapolations, and these are not the run's.
        engine = system.engine(0, copy.copy(system.cost))
        effort = (sample.window, TURNOVERS)
        if system.why_plain is not None:  # a step costs as much as it has requests
            effort = (min(sample.window, MIN_WINDOW // 3), TURNOVERS // 2)
        longest_ns = MOST_STEPS * copy.copy(system.cost).step_ns(StepShape(1, 1, 1, (), 1))
        found = saturate(engine, sample.requests, backlog, *effort, longest_ns)
        if found is None:
            return None
        # What the engine rejects is part of the load, and costs nothing.
        reached = served | (
            (rows["status"] == STATUSES.index(Status.REJECTED)) & (rows["replica"] >= 0)
        )
        number = int(reached.sum())
        prefill = int((rows["prompt_tokens"] - rows["cached_tokens"])[served].sum())
        output = int(rows["output_tokens"][served].sum())
        rate = found.requests_per_s(
            prefill / number,
            output / number,
            copy.copy(system.cost),
            system.config.max_num_batched_tokens,
        )
        return Capacity(rate, found.requests)
