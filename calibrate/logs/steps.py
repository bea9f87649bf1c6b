"""Durations of recorded steps, predicted: the parts of the cost model times their scales, composed
with the host's work as `StepCost` composes them."""

from __future__ import annotations

import numpy as np

from calibrate.logs.records import FloatArray, IntArray, Steps
from calibrate.logs.server import cost_of, host_of, target_of
from sim.cost.host import overlaps
from sim.cost.profile import Profile
from sim.cost.server import ServerFit
from sim.engine.config import EngineConfig
from sim.errors import UserError
from sim.system import System

KINDS = ("decode", "prefill", "mixed")


class StepModel:
    """Predicts the steps of one log for any scales and constants, in one vectorised pass."""

    def __init__(self, log: Steps, system: System, base: Profile) -> None:
        check_fits(log, system.config)
        shapes, config = log.shapes, system.config
        target = target_of(system, base, ServerFit())
        parts = cost_of(system, base, ServerFit()).parts_s(shapes)
        self._system = system
        self._device = {name: seconds for name, seconds in parts.items() if name != "host"}
        """Of scale 1."""
        self._sequences = shapes.num_decodes + num_chunks(log)
        self._overlaps = overlaps(config)
        layers = target.tables.rank.stage_layers
        self._launches = target.host.launches_per_layer * layers if config.enforce_eager else 0

    def duration_s(self, fit: ServerFit) -> FloatArray:
        """Of every step."""
        host = host_of(self._system, fit)
        device = np.zeros(len(self._sequences))
        for name, seconds in self._device.items():
            device = device + fit.scale(name) * seconds
        device = np.maximum(device, host.launch_us * 1e-6 * self._launches)
        if self._overlaps:
            work = (host.async_us + host.async_per_seq_us * self._sequences) * 1e-6
            return np.asarray(np.maximum(device, work))
        work = (host.sync_us + host.sync_per_seq_us * self._sequences) * 1e-6
        return np.asarray(device + work)


def num_chunks(log: Steps) -> IntArray:
    """Prefill chunks of every step."""
    return np.bincount(log.shapes.chunk_step, minlength=len(log)).astype(np.int64)


def kinds(log: Steps) -> IntArray:
    """Index into `KINDS` of every step."""
    chunks = num_chunks(log) > 0
    return np.where(chunks, np.where(log.shapes.num_decodes > 0, 2, 1), 0).astype(np.int64)


def check_fits(log: Steps, config: EngineConfig) -> None:
    """UserError for steps that an engine so configured cannot have made."""
    shapes, query = log.shapes, config.decode_query_len
    longest = shapes.decode_context / np.maximum(shapes.num_decodes, 1)
    chunk = shapes.chunk_tokens + shapes.chunk_prefix
    logits = shapes.num_sampled + shapes.decode_tokens - shapes.num_decodes
    most = max(config.max_num_batched_tokens, config.max_num_seqs * query)
    limits = (
        ("tokens", shapes.num_tokens, most, "max_num_batched_tokens"),
        ("requests", shapes.num_decodes + num_chunks(log), config.max_num_seqs, "max_num_seqs"),
        ("sampled positions", logits, config.max_num_seqs * query, "max_num_seqs"),
        ("tokens of context", longest, config.max_model_len, "max_model_len"),
        ("tokens of a prompt", chunk, config.max_model_len, "max_model_len"),
    )
    for of, values, limit, setting in limits:
        top = float(values.max(initial=0))
        if top > limit:
            raise UserError(
                f"{log.name}: a step with {top:,.0f} {of} cannot be of an engine with {setting} "
                f"{getattr(config, setting)}; give the server's own: --set engine.{setting}=NUMBER"
            )
