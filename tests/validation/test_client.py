"""The load-generating client in front of a simulated cluster, and the metrics of its run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calibrate.validation.client import Client
from calibrate.validation.cold_start import COMPILE_NS, ColdExperts
from calibrate.validation.outcome import measure
from calibrate.validation.workloads import Load, StageLoad
from policies.admission.always import Always
from policies.routing.round_robin import RoundRobin
from sim.cluster.clock import Clock
from sim.cluster.cluster import Cluster
from sim.cost.interface import FloatArray, IntArray, StepShape, StepShapes
from sim.engine.config import EngineConfig
from sim.engine.plain import PlainEngine
from sim.request import Segment

MS = 1_000_000


class OneMillisecond:
    """Every step lasts 1 ms; a request travels 2 ms to the engine and a token 3 ms back."""

    def step_ns(self, shape: StepShape) -> int:
        return MS

    def decode_run_ns(
        self, num_decodes: int, decode_context: int, decode_context_sq: int, n: int
    ) -> IntArray:
        return np.full(n, MS, dtype=np.int64)

    def parts_s(self, shapes: StepShapes) -> dict[str, FloatArray]:
        raise NotImplementedError

    def arrival_ns(self, prompt_tokens: int) -> int:
        return 2 * MS

    def delivery_ns(self, num_running: int) -> int:
        return 3 * MS

    def describe(self) -> dict[str, Any]:
        return {}


def stage(offsets_ms: list[int], outputs: list[int], pause_ms: int = 0) -> StageLoad:
    return StageLoad(
        pause_ns=pause_ms * MS,
        offsets_ns=np.array(offsets_ms, dtype=np.int64) * MS,
        prompts=np.zeros(len(offsets_ms), dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
    )


def run(
    *stages: StageLoad,
    max_in_flight: int | None = None,
    timeout_ms: int | None = None,
    seqs: int = 8,
) -> tuple[dict[str, IntArray], dict[tuple[int, str], float]]:
    """Rows of all requests, and the metrics, on one synchronous engine."""
    config = EngineConfig(num_gpu_blocks=100, max_num_seqs=seqs, async_scheduling=False)
    cost, clock = OneMillisecond(), Clock()
    engine = PlainEngine(config, cost)
    timeout_ns = timeout_ms * MS if timeout_ms else None
    cluster = Cluster(clock, [engine], config, cost, Always(), RoundRobin(), timeout_ns)
    load = Load(tuple(stages), ((Segment(0, 0, 10),),), max_in_flight, timeout_ns)
    client = Client(clock, cluster, load)
    client.start()
    clock.run()
    rows = cluster.records.columns()
    return rows, measure(rows, [engine.log], cost, client.stage_of)


def test_latencies_count_from_sending_to_the_client() -> None:
    _, values = run(stage([0], [4]))
    assert values[-1, "ttft_mean"] == 2 + 1 + 3
    assert values[-1, "e2e_mean"] == 2 + 4 + 3
    assert values[-1, "tpot_mean"] == pytest.approx(1.0)
    assert values[-1, "makespan_s"] == pytest.approx(0.009)
    assert values[-1, "req_per_s"] == pytest.approx(1 / 0.009)
    assert values[-1, "output_tok_per_s"] == pytest.approx(4 / 0.009)


def test_a_stage_waits_for_the_one_before_and_its_pause() -> None:
    rows, values = run(stage([0, 1], [5, 50]), stage([3], [1], pause_ms=1000))
    # The last request of stage 0 leaves the engine 1 + 2 + 50 ms after the start.
    assert rows["arrival_ns"].tolist() == [0, 1 * MS, (53 + 1000 + 3) * MS]
    assert values[0, "req_per_s"] == pytest.approx(2 / 0.056)
    assert {s for s, _ in values} == {-1, 0, 1}


def test_above_its_slots_the_client_is_a_closed_loop() -> None:
    rows, _ = run(stage([0, 0, 0, 0], [5, 5, 5, 5]), max_in_flight=2)
    assert rows["arrival_ns"].tolist() == [0, 0, 7 * MS, 7 * MS]


def test_a_timeout_aborts_and_counts_as_failed() -> None:
    rows, values = run(stage([0, 0], [3, 100]), timeout_ms=20)
    assert rows["finish_ns"].max() == 20 * MS
    assert values[-1, "fail_frac"] == 0.5
    assert values[-1, "e2e_mean"] == 2 + 3 + 3  # of the one that succeeded


def test_nothing_completed_is_nan_not_an_error() -> None:
    _, values = run(stage([0], [100]), timeout_ms=20)
    assert np.isnan(values[-1, "ttft_mean"])
    assert values[-1, "req_per_s"] == 0.0
    assert values[-1, "fail_frac"] == 1.0


def test_cold_experts_compile_once_per_bucket() -> None:
    cost = ColdExperts(OneMillisecond())

    def step(tokens: int) -> int:
        return cost.step_ns(StepShape(0, 0, 0, [(tokens, 0)], 1))

    assert [step(n) for n in (200, 600, 700, 1200, 512, 1100)] == [
        MS,
        MS + COMPILE_NS,
        MS,
        MS + COMPILE_NS,
        MS,
        MS,
    ]
