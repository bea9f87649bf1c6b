"""What a simulation gives back: the summary, and the request and step tables as DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sim.cluster.records import STATUSES
from sim.cost.hardware import Gpu
from sim.cost.interface import CostModel
from sim.cost.models import ModelShape
from sim.engine.config import EngineConfig
from sim.engine.log import StepLog
from sim.engine.waste import WasteLog
from sim.metrics.capacity import Capacity
from sim.metrics.distribution import NS, IntArray
from sim.metrics.requests import RequestTimes, client_times, token_times
from sim.metrics.steps import StepDigest, digest
from sim.metrics.summary import Observed, summarise
from sim.request import Request, Trace
from sim.rerun import shown_policy, shown_workload
from sim.scenario import Scenario

if TYPE_CHECKING:
    import pandas as pd


class ResolvedSystem(Protocol):
    """What a result needs to know of the system that was simulated."""

    model: ModelShape
    gpu: Gpu
    config: EngineConfig
    cost: CostModel
    notes: list[str]

    @property
    def why_plain(self) -> str | None: ...

    @property
    def fast(self) -> bool: ...


@dataclass(repr=False)
class Result:
    """One finished (or stopped) run. Tables and summary are made when first asked for; printing
    it prints the table that the command prints."""

    scenario: Scenario
    trace: Trace | None
    submitted: dict[int, Request]
    """Requests that came in from outside the trace, by uid."""
    rows: dict[str, IntArray]
    reasons: Sequence[str]
    logs: Sequence[StepLog]
    wastes: Sequence[WasteLog | None]
    """How each replica used its KV memory, step by step, where the policy made it worth noting."""
    system: ResolvedSystem
    capacity: Capacity | None
    end_ns: int
    num_events: int
    wall_s: float
    cpu_s: float
    """Time spent in the event loop."""

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The JSON document, but for `run.wall_s`: equal for equal scenarios."""
        config = self.system.config
        seen = Observed(
            rows=self.rows,
            reasons=self.reasons,
            digests=self._digests,
            times=self._times,
            num_blocks=config.num_usable_blocks,
            config=config,
            cost=self.system.cost,
            capacity=self.capacity,
            end_ns=self.end_ns,
        )
        found = summarise(seen, self.scenario.slo, self.scenario.warm_up_s)
        steps = found.pop("steps")
        known = len(self.submitted) + (0 if self.trace is None else len(self.trace))
        found["requests"]["not_arrived"] = known - found["requests"]["total"]
        head: dict[str, Any] = {"trace": self._trace_section()}
        found["run"] = {
            "seed": self.scenario.seed,
            "steps": steps,
            "events": self.num_events,
            "simulated_s": self.end_ns / NS,
            "model": self.system.model.name,
            "gpu": self.system.gpu.name,
            "replicas": len(self.logs),
            "engine": self._engine_name(),
            "why_plain": self.system.why_plain,
            "policy": shown_policy(self.scenario.policy.name),
            "notes": self.system.notes,
        }
        return head | found

    def __repr__(self) -> str:
        name, number = self.scenario.policy.name, len(self.rows["uid"])
        return f"<Result of {number:,} requests, {name}>"

    def __str__(self) -> str:
        from sim.output_table import Style, render

        return render(self.summary, self.scenario, Style(colour=False))

    def _engine_name(self) -> str:
        if self.scenario.execute.device is not None:
            return "real"
        return "fast" if self.system.fast else "plain"

    def _trace_section(self) -> dict[str, Any]:
        trace = self.trace
        if trace is None:
            return {"name": "live", "format": "live", "requests": len(self.submitted), "counts": {}}
        return {
            "name": shown_workload(trace.name) if trace.format == "generated" else trace.name,
            "format": trace.format,
            "requests": len(trace),
            "counts": dict(trace.counts),
        }

    @cached_property
    def _digests(self) -> list[StepDigest]:
        warm_up_ns = round(self.scenario.warm_up_s * NS)
        return [
            digest(log, self.system.cost, token_times(self.rows, replica), waste, warm_up_ns)
            for replica, (log, waste) in enumerate(zip(self.logs, self.wastes, strict=True))
        ]

    @cached_property
    def _times(self) -> RequestTimes:
        return client_times(self.rows, self._digests, self.system.cost)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request that arrived, by uid. Times in seconds from the start of the
        simulation, latencies as the client saw them; missing values are NaN."""
        import pandas as pd

        return pd.DataFrame(self.request_columns())

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per engine step: `replica`, then the columns of `StepLog.table()`, with
        `start_s` and `end_s` in seconds."""
        import pandas as pd

        tables = [pd.DataFrame(self.step_columns(i)) for i in range(len(self.logs))]
        return pd.concat(tables, ignore_index=True)

    def request_columns(self) -> dict[str, Any]:
        """The columns of `requests`."""
        rows, times = self.rows, self._times
        statuses = np.array([s.value for s in STATUSES], dtype=object)
        table: dict[str, Any] = {
            "id": self._texts("ids", "id"),
            "status": statuses[rows["status"]],
            "reason": np.array(self.reasons, dtype=object)[rows["reason"]],
            "replica": rows["replica"],
            "arrival_s": rows["arrival_ns"] / NS,
            "prompt_tokens": rows["prompt_tokens"],
            "output_tokens": rows["output_tokens"],
            "wanted_tokens": rows["wanted_tokens"],
            "ttft_s": times.ttft_s,
            "tpot_s": times.tpot_s,
            "e2e_s": times.e2e_s,
            "queue_s": times.queue_s,
        }
        for name in ("queued", "first_scheduled", "first_token", "finish"):
            ns = rows[f"{name}_ns"]
            table[f"{name}_s"] = np.where(ns >= 0, ns / NS, np.nan)
        for name in ("cached_tokens", "preemptions", "recomputed_tokens"):
            table[name] = rows[name]
        for name in ("tenant", "session"):
            if self._has(name):
                table[name] = self._texts(name, name)
        if self._has("priority"):
            table["priority"] = np.array(self._fields("priority", "priority"), dtype=np.int64)
        return table

    def step_columns(self, replica: int) -> dict[str, Any]:
        """The columns of `steps`, of one replica."""
        columns = self.logs[replica].table()
        start, end = columns.pop("start_ns"), columns.pop("end_ns")
        head: dict[str, Any] = {
            "replica": np.full(len(start), replica, dtype=np.int64),
            "start_s": start / NS,
            "end_s": end / NS,
        }
        return head | columns

    def _has(self, name: str) -> bool:
        if self.trace is not None and getattr(self.trace, name) is not None:
            return True
        return any(getattr(r, name) for r in self.submitted.values())

    def _texts(self, column: str, name: str) -> Any:
        return np.array([str(value) for value in self._fields(column, name)], dtype=object)

    def _fields(self, column: str, name: str) -> list[Any]:
        """A field of every request: from the trace's column, or from a submitted request."""
        values = getattr(self.trace, column) if self.trace is not None else None
        missing: Any = 0 if name == "priority" else ""
        found = []
        for uid in self.rows["uid"].tolist():
            if uid in self.submitted:
                found.append(getattr(self.submitted[uid], name))
            elif values is None:
                found.append(uid if name == "id" else missing)
            else:
                found.append(values[uid])
        return found
