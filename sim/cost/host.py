"""Time that is not the device's: the engine's host work per step, and the server around it.

Constants belong to an engine version, never to a model or an experiment. They were fitted on the
open deployments of `ground_truth`; see docs for what each of them explains.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.engine.config import EngineConfig
from sim.errors import UserError


@dataclass(frozen=True)
class HostModel:
    """Host work of one engine step, microseconds.

    Without async scheduling it adds to the device's time (schedule, prepare inputs, launch, copy
    the tokens back, update the requests). With it, all of it overlaps with the device and a step
    lasts at least `async_us + async_per_seq_us * sequences`.
    """

    sync_us: float
    sync_per_seq_us: float
    async_us: float
    async_per_seq_us: float
    launch_us: float = 17.5
    """Launching one kernel from Python, without CUDA graphs (`enforce_eager`); hidden while the
    device is busier than the host. (From the one eager deployment with published latencies.)"""
    launches_per_layer: int = 16


NO_HOST = HostModel(0.0, 0.0, 0.0, 0.0)


def overlaps(engine: EngineConfig) -> bool:
    """Whether the host works while a step is on the devices: for the next one with async
    scheduling, for those in other stages with a pipeline."""
    return engine.async_scheduling or engine.pipeline_parallel_size > 1


@dataclass(frozen=True)
class Frontend:
    """The server around the engine, as its client sees it, microseconds."""

    arrival_us: float
    """HTTP, tokenisation of a short prompt, the queue to the engine core."""
    arrival_per_token_us: float
    delivery_us: float
    """From the end of a step to a token at the client."""
    delivery_per_seq_us: float
    """Each running sequence's output is processed before it reaches its client."""


HOSTS: tuple[tuple[tuple[int, ...], HostModel], ...] = (
    ((0, 0), HostModel(2500.0, 30.0, 2500.0, 30.0)),
    ((0, 8), HostModel(900.0, 11.0, 1100.0, 12.0)),
    ((0, 14), HostModel(900.0, 11.0, 1000.0, 10.0)),
)
"""By the first version a model describes: V0, V1, and V1 since async scheduling is the default."""

FRONTENDS = {
    "http": Frontend(1500.0, 0.25, 4000.0, 51.0),
    "network": Frontend(6000.0, 0.25, 9000.0, 26.0),
    "in-process": Frontend(400.0, 0.25, 1600.0, 20.0),
    "none": Frontend(0.0, 0.0, 0.0, 0.0),
}
"""`http`: client and server on one machine; `network`: a hop between; `in-process`: no HTTP."""


def host_model(version: str) -> HostModel:
    """The host work of an engine version such as `0.15.1`."""
    wanted = parse_version(version)
    return [model for first, model in HOSTS if first <= wanted][-1]


def parse_version(version: str) -> tuple[int, ...]:
    """`0.15.1 (a remark)` -> (0, 15, 1). Raises UserError for anything else."""
    head = version.strip().split()[0] if version.strip() else ""
    parts = head.removeprefix("v").split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 9 for part in parts):
        raise UserError(f"engine version {version!r} is not like 0.33.0")
    return tuple(map(int, parts))
