"""From a scenario to a result: composes cost model, engines, policies, trace and cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sim.cluster.arrivals import Progress, arrivals
from sim.cluster.clock import Clock, Rank
from sim.cluster.cluster import Cluster
from sim.cost import build_cost_model, plan_memory
from sim.cost.hardware import Gpu, gpu
from sim.cost.host import parse_version
from sim.cost.interface import CostModel
from sim.cost.models import ModelShape, model
from sim.cost.profile import load as load_profile
from sim.engine.config import EngineConfig
from sim.engine.interface import Engine
from sim.errors import UserError
from sim.metrics.capacity import Capacity, measure_capacity, spread_evenly
from sim.metrics.distribution import NS
from sim.protocols import AdmissionPolicy, EvictionPolicy, RoutingPolicy, SchedulingPolicy
from sim.registry import make_policy
from sim.request import Request, Trace
from sim.result import Result
from sim.scenario import PolicyChoice, Scenario


def simulate(
    scenario: Scenario | None = None,
    *,
    trace: Trace | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> Result:
    """Run a scenario to its end.

    `fields` are the scenario's, as in its YAML file, instead of or on top of `scenario`:
    `simulate(trace="azure.csv", policy="static")`. `trace` may also be a Trace. Raises UserError.
    """
    if isinstance(trace, str | Path):
        fields["trace"] = str(trace)
        trace = None
    if scenario is None:
        scenario = Scenario.of(**fields)
    elif fields:
        scenario = scenario.with_(fields)
    simulation = Simulation(scenario)  # first: it finds wrong names before a long trace is read
    simulation.serve(load_trace(scenario) if trace is None else trace, progress)
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
    trace = traces.generate(scenario.generate, scenario.seed)
    if scenario.start_s is not None or scenario.end_s is not None:
        trace = traces.window(trace, scenario.start_s, scenario.end_s)
    if scenario.limit is not None:
        trace = traces.limit(trace, scenario.limit)
    return traces.scale_rate(trace, scenario.rate_scale)


@dataclass
class System:
    """A scenario with every name resolved: what is needed to make engines."""

    scenario: Scenario
    model: ModelShape
    gpu: Gpu
    config: EngineConfig
    cost: CostModel
    notes: list[str]
    """What was decided for the user and is worth knowing."""

    @classmethod
    def of(cls, scenario: Scenario) -> System:
        shape, device = model(scenario.model), gpu(scenario.gpu)
        notes: list[str] = []
        policy = _policy("scheduling", scenario.policy, scenario.seed, 0)
        config = _engine_config(scenario, shape, device, policy, notes)
        version = parse_version(scenario.cost.engine_version)
        if config.num_gpu_blocks is None:
            config = config.with_blocks(plan_memory(shape, device, config, version).num_blocks)
        else:
            plan_memory(shape, device, config, version)  # the weights must fit all the same
        profile = scenario.cost.profile
        cost = build_cost_model(
            shape,
            device,
            config,
            load_profile(Path(profile)) if profile is not None else None,
            engine_version=scenario.cost.engine_version,
            frontend=scenario.cost.frontend,
            host_zero=scenario.cost.host_zero,
        )
        return cls(scenario, shape, device, config, cost, notes)

    @cached_property
    def why_plain(self) -> str | None:
        """Why the plain engine runs this scenario; None when the fast one does."""
        if not self.scenario.fast_forward:
            return "fast_forward is off"
        from sim.engine.fast import why_plain

        return why_plain(self.config, self.policy(0), self.eviction(0))

    def policy(self, replica: int) -> SchedulingPolicy:
        """A new scheduling policy object for one replica."""
        made: SchedulingPolicy = _policy(
            "scheduling", self.scenario.policy, self.scenario.seed, replica
        )
        return made

    def eviction(self, replica: int) -> EvictionPolicy:
        """A new eviction policy object for one replica."""
        made: EvictionPolicy = _policy(
            "eviction", self.scenario.eviction, self.scenario.seed, replica
        )
        return made

    def engine(self, replica: int) -> Engine:
        """A new, empty engine with policies of its own."""
        if self.why_plain is None:
            from sim.engine.fast import FastEngine

            return FastEngine(self.config, self.cost)
        from sim.engine.plain import PlainEngine

        return PlainEngine(self.config, self.cost, self.policy(replica), self.eviction(replica))


class Simulation:
    """One run on a virtual clock. Raises UserError for names and settings that cannot be.

    `serve(trace)` and `run()` take a whole trace through. Without them the simulation is driven
    from outside: `submit(request)` and `advance(until_s)` in any order, `result()` at any time.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        admission: AdmissionPolicy = _policy("admission", scenario.admission, scenario.seed, 0)
        routing: RoutingPolicy = _policy("routing", scenario.routing, scenario.seed, 0)
        self.system = system = System.of(scenario)
        self.trace: Trace | None = None
        self.clock = Clock()
        engines = [system.engine(i) for i in range(scenario.cluster.replicas)]
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
        self.wall_s = 0.0
        """Wall time spent in the event loop."""
        self._submitted: dict[int, Request] = {}

    def serve(self, trace: Trace, progress: Progress | None = None) -> None:
        """Let the requests of `trace` arrive at their times. Once, and before anything else."""
        if self.trace is not None or self._submitted or self.clock.now_ns:
            raise UserError("a simulation serves one trace, from its very start")
        self.trace = trace
        self.clock.env.process(arrivals(self.clock, self.cluster, trace, progress))

    @property
    def now_s(self) -> float:
        return self.clock.now_ns / NS

    def submit(self, request: Request) -> None:
        """`request` will arrive at its `arrival_ns`, which must not be in the past. Its `uid`
        must be new: numbers from `len(trace)` on, when there is a trace."""
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
        until_ns = round(until_s * NS)
        if until_ns < self.clock.now_ns:
            raise UserError(f"cannot advance to {until_s} s: it is {self.now_s} s already")
        self._run(until_ns)

    def run(self) -> None:
        """Let time pass until all is done, or until the scenario's horizon."""
        horizon_s = self.scenario.horizon_s
        self._run(None if horizon_s is None else round(horizon_s * NS))

    def _run(self, until_ns: int | None) -> None:
        begun = time.perf_counter()
        self.clock.run(until_ns)
        self.wall_s += time.perf_counter() - begun

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
            system=system,
            capacity=self._capacity(rows),
            end_ns=self.clock.now_ns if inside else done_ns,
            num_events=self.clock.num_events,
            wall_s=self.wall_s,
        )

    def _capacity(self, rows: dict[str, Any]) -> Capacity | None:
        """Measure what one replica can serve, on requests like those seen so far."""
        if not self.scenario.capacity_probe or not len(rows["uid"]):
            return None
        system = self.system
        backlog = system.config.max_num_admitted_seqs
        most = 20 * backlog + 4000
        return measure_capacity(system.engine(0), self._typical(rows, most), backlog)

    def _typical(self, rows: dict[str, Any], most: int) -> Iterator[Request]:
        """Requests for the capacity measurement: any stretch of them is like the whole.

        Where requests share text their order matters, and those that replica 0 got are taken as
        they came. Otherwise they are spread evenly over output and prompt lengths.
        """
        trace = self.trace
        if trace is None or trace.segments is not None or trace.session is not None:
            uids = rows["uid"][rows["replica"] == 0]
            uids = uids if len(uids) else rows["uid"]
        else:
            spread = spread_evenly(rows["wanted_tokens"], rows["prompt_tokens"], most)
            uids = rows["uid"][spread]
        return islice(self._anew(uids.tolist()), most)

    def _anew(self, order: list[int]) -> Iterator[Request]:
        """The requests of these uids, over and over, renumbered: private texts are new ones."""
        number = 0
        while True:
            for uid in order:
                known = self._submitted.get(uid)
                if known is None and self.trace is not None:
                    known = self.trace.request(uid)
                assert known is not None  # every row is of a known request
                yield replace(known, uid=number, id=str(number), arrival_ns=0)
                number += 1


def _engine_config(
    scenario: Scenario,
    shape: ModelShape,
    device: Gpu,
    policy: SchedulingPolicy,
    notes: list[str],
) -> EngineConfig:
    settings = dict(scenario.engine)
    if settings.get("sliding_window") is None and shape.sliding_layers is None:
        settings["sliding_window"] = shape.sliding_window
    if policy.chunked_prefill is not None:
        settings["enable_chunked_prefill"] = policy.chunked_prefill
        longest = settings.get("max_model_len") or shape.context
        budget = settings.get("max_num_batched_tokens")
        if not policy.chunked_prefill and budget is not None and budget < longest:
            settings["max_num_batched_tokens"] = longest
            notes.append(
                f"max_num_batched_tokens raised from {budget} to {longest}: {scenario.policy.name} "
                f"computes prompts whole, up to max_model_len"
            )
    if policy.layout != "paged":
        settings["enable_prefix_caching"] = False
    return EngineConfig.for_gpu(device.name, device.memory_bytes, shape.context, settings)


def _policy(kind: str, choice: PolicyChoice, seed: int, index: int) -> Any:
    """A new policy object with a random stream of its own."""
    policy = make_policy(kind, choice.name, choice.options)
    stream = ("scheduling", "eviction", "admission", "routing").index(kind)
    policy.prepare(np.random.default_rng([seed, stream, index]))
    return policy
