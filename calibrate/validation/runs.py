"""Simulates experiments, several seeds each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from calibrate.validation.client import Client
from calibrate.validation.cold_start import ColdExperts
from calibrate.validation.deployment import Deployment, deployment
from calibrate.validation.disaggregated import run_disaggregated
from calibrate.validation.experiments import Experiment
from calibrate.validation.outcome import Values, mean_of_seeds, measure
from calibrate.validation.workloads import Load, regenerate
from policies.admission.always import Always
from policies.routing.least_requests import LeastRequests
from sim.cluster.clock import Clock
from sim.cluster.cluster import Cluster
from sim.cost.interface import CostModel
from sim.engine.config import EngineConfig
from sim.engine.fast import FastEngine, supports
from sim.engine.interface import Engine
from sim.engine.plain import PlainEngine
from sim.errors import UserError

Progress = Callable[[str], None]
"""Called with the id of every experiment that is done."""


@dataclass(frozen=True)
class Prediction:
    """What was predicted for one experiment."""

    experiment: str
    values: Values
    """Averages over the seeds."""
    spread: Values
    """Half the range over the seeds, per value."""
    notes: dict[str, Any]
    """What was assumed where the entry is silent, and counters of the runs."""


def predict(
    experiment: Experiment,
    others: Sequence[Experiment] = (),
    seeds: Sequence[int] = (0, 1, 2),
    fast: bool = True,
) -> Prediction:
    """Simulate one experiment from its entry alone. UserErrors name it."""
    try:
        return _predict(experiment, others, seeds, fast)
    except UserError as error:
        raise UserError(f"experiment {experiment.id}: {error}") from error


def _predict(
    experiment: Experiment, others: Sequence[Experiment], seeds: Sequence[int], fast: bool
) -> Prediction:
    server = deployment(experiment, others)
    cost = server.cost_model()
    runs, notes = [], _notes(server)
    for seed in seeds:
        load = regenerate(experiment, seed)
        if experiment.disaggregated:
            runs.append(run_disaggregated(server, cost, load, partial(make_engine, fast=fast)))
        else:
            values, counts = run_unified(experiment, server, cost, load, fast)
            runs.append(values)
            for name, count in counts.items():
                notes[name] = notes.get(name, 0) + count / len(seeds)
    spread = {key: float(np.ptp([run[key] for run in runs])) / 2 for key in runs[0]}
    notes["extrapolated_fraction"] = cost.describe().get("extrapolated_fraction")
    return Prediction(experiment.id, mean_of_seeds(runs), spread, notes)


def run_unified(
    experiment: Experiment, server: Deployment, cost: CostModel, load: Load, fast: bool = True
) -> tuple[Values, dict[str, float]]:
    """One seed on `server.replicas` equal replicas; metrics, and counters of the engines."""
    clock = Clock()
    engines = [
        make_engine(server.engine, ColdExperts(cost) if server.cold_experts else cost, fast)
        for _ in range(server.replicas)
    ]
    cluster = Cluster(
        clock, engines, server.engine, cost, Always(), LeastRequests(), load.timeout_ns
    )
    client = Client(clock, cluster, load)
    client.start()
    clock.run()
    logs = [engine.log for engine in engines]
    values = measure(
        cluster.records.columns(),
        logs,
        cost,
        client.stage_of,
        from_queue=experiment.measured_from_queue,
    )
    rows = cluster.records.columns()
    counts = {
        "preemptions": float(rows["preemptions"].sum()),
        "prefix_hit_rate": float(rows["cached_tokens"].sum() / rows["prompt_tokens"].sum()),
        "steps": float(sum(len(log) for log in logs)),
    }
    return values, counts


def make_engine(config: EngineConfig, cost: CostModel, fast: bool = True) -> Engine:
    """An empty engine; the fast one where it supports the configuration."""
    if fast and supports(config):
        return FastEngine(config, cost)
    return PlainEngine(config, cost)


def predict_all(
    chosen: Sequence[Experiment],
    others: Sequence[Experiment],
    seeds: Sequence[int],
    jobs: int,
    progress: Progress,
) -> list[Prediction]:
    """Predictions in the order of `chosen`, over `jobs` processes."""
    one = partial(predict, others=others, seeds=seeds)
    found = []
    if jobs == 1:
        for experiment in chosen:
            found.append(one(experiment))
            progress(experiment.id)
        return found
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        for prediction in pool.map(one, chosen):
            found.append(prediction)
            progress(prediction.experiment)
    return found


def _notes(server: Deployment) -> dict[str, Any]:
    return {
        "model": server.model.name,
        "gpu": server.gpu.name,
        "engine_version": server.version,
        "frontend": server.frontend,
        "kv_blocks": server.engine.num_gpu_blocks,
        "kv_blocks_from": server.kv_blocks_from,
    }
