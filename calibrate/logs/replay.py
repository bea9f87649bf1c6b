"""Latencies of recorded requests, predicted: the recorded load is simulated.

An open loop sends every request at its recorded time. In a closed loop a request waits for a slot,
so how fast the server is decides when it is sent; then the recorded order and the number of slots
are what is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibrate.logs.records import LATENCIES, FloatArray, Requests
from calibrate.logs.server import cost_of
from calibrate.validation.client import Client
from calibrate.validation.workloads import Load, StageLoad
from sim.cost.profile import Profile
from sim.cost.server import ServerFit
from sim.errors import UserError
from sim.request import Segment, Trace, prompt_key
from sim.run import Simulation
from sim.system import System
from traces.segments import from_prefixes


class Replay:
    """Predicts the requests of one run for any scales and constants: a simulation each."""

    def __init__(self, run: Requests, system: System, base: Profile) -> None:
        self._run, self._system, self._base = run, system, base

    def latencies(self, fit: ServerFit) -> dict[str, FloatArray]:
        """Seconds by name (`LATENCIES`), in the order of the run; NaN for a request that was not
        served. UserError when none was."""
        run, system = self._run, self._system
        cost = cost_of(system, self._base, fit)
        simulation = Simulation(system.scenario, replace(system, cost=cost))
        if run.max_in_flight is None:
            simulation.serve(_trace(run))
        else:
            Client(simulation.clock, simulation.cluster, _load(run)).start()
        simulation.run()
        result = simulation.result()
        columns = result.request_columns()
        rows = result.rows["uid"]  # numbers of the run's requests
        found = {}
        for name in LATENCIES:
            values = np.full(len(run), np.nan)
            values[rows] = np.where(columns["status"] == "completed", columns[f"{name}_s"], np.nan)
            found[name] = values
        if np.isnan(found["e2e"]).all():
            reasons = sorted({str(r) for r in columns["reason"].tolist() if r})
            raise UserError(
                f"{run.name}: the simulated server completes none of its requests "
                f"({', '.join(reasons) or 'unfinished'}); are model and engine settings the "
                f"server's?"
            )
        return found


def _trace(run: Requests) -> Trace:
    segments = None
    if run.content is not None:
        segments = from_prefixes(run.prompt_tokens, run.content, run.prompt_tokens)
    return Trace(
        name=run.name,
        format="log",
        arrival_ns=np.round(run.sent_s * 1e9).astype(np.int64),
        prompt_tokens=run.prompt_tokens,
        output_tokens=run.output_tokens,
        segments=segments,
    )


def _load(run: Requests) -> Load:
    stage = StageLoad(
        pause_ns=0,
        offsets_ns=np.round(run.sent_s * 1e9).astype(np.int64),
        prompts=np.arange(len(run), dtype=np.int64),
        output_tokens=run.output_tokens,
    )
    return Load((stage,), tuple(_prompts(run)), run.max_in_flight, None)


def _prompts(run: Requests) -> Sequence[tuple[Segment, ...]]:
    keys = range(len(run)) if run.content is None else run.content.tolist()
    private = run.content is None
    return [
        (Segment(prompt_key(key) if private else key, 0, tokens),)
        for key, tokens in zip(keys, run.prompt_tokens.tolist(), strict=True)
    ]
