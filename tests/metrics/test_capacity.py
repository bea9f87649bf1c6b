"""The measured capacity: known servers, representative samples, the rate at which queues grow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from sim import simulate
from sim.cost.interface import StepShape
from sim.metrics.capacity import MIN_WINDOW, Saturated, saturate
from sim.metrics.sample import spread_evenly, typical_requests
from sim.request import Request, Segment, Trace, output_key, prompt_key
from tests.cluster.toy import ToyEngine

LENGTHS = "prompt=lognormal(500,1500,max=6000),output=lognormal(100,300,max=1500)"


def endless(output: int, most: int = 10**6) -> Iterator[Request]:
    return (Request(i, str(i), 0, 1, output) for i in range(most))


class Linear:
    """Every token of a step costs a microsecond."""

    def step_ns(self, shape: StepShape) -> int:
        return 1000 * shape.num_tokens


@pytest.mark.parametrize(("slots", "output"), [(1, 1), (4, 7), (64, 20)])
def test_capacity_of_a_known_server(slots: int, output: int) -> None:
    """`slots` requests at a time, a token each per 10 ms."""
    found = saturate(ToyEngine(10_000_000, slots), endless(output), backlog=slots)
    assert found is not None
    assert found.output_tokens_per_s == pytest.approx(slots * 100, rel=0.02)
    assert found.mean_running == pytest.approx(slots, rel=0.02)
    assert found.requests >= MIN_WINDOW
    rate = found.requests_per_s(0, output, Linear(), 2048)  # type: ignore[arg-type]
    assert rate == pytest.approx(slots * 100 / output, rel=0.02)


def test_requests_with_twice_the_work_come_half_as_often() -> None:
    found = Saturated(1000.0, 500.0, 10.0, 100.0, 1000)
    rates = [found.requests_per_s(n * 20, n * 10, Linear(), 64) for n in (1, 2)]  # type: ignore[arg-type]
    assert rates == pytest.approx([50.0, 25.0])


def test_a_budget_of_one_token() -> None:
    found = Saturated(10.0, 10.0, 1.0, 100.0, 1000)
    assert found.requests_per_s(1, 1, Linear(), 1) == pytest.approx(10.0)  # type: ignore[arg-type]


def test_too_few_requests_to_measure() -> None:
    engine = ToyEngine(10_000_000, 64)
    assert saturate(engine, endless(20, most=30), backlog=64) is None


def test_all_requests_rejected_is_no_capacity() -> None:
    assert saturate(ToyEngine(longest=0), endless(1, most=50), backlog=4) is None


def test_every_stretch_of_a_spread_sample_is_like_the_whole() -> None:
    rng = np.random.default_rng(0)
    first = rng.lognormal(5, 1, 5000).astype(np.int64)
    second = (first * rng.lognormal(0, 1, 5000)).astype(np.int64)  # correlated
    order = spread_evenly(first, second, 10_000)
    for start in range(0, 9000, 1000):
        stretch = order[start : start + 1000]
        assert first[stretch].mean() == pytest.approx(first.mean(), rel=0.02)
        assert second[stretch].mean() == pytest.approx(second.mean(), rel=0.06)


@pytest.mark.parametrize("n", [1, 2, 5, 100])
def test_a_spread_sample_of_few_rows_takes_them_all(n: int) -> None:
    order = spread_evenly(np.arange(n), np.zeros(n, np.int64), 100 * n)
    assert set(order.tolist()) == set(range(n))


def test_repeated_requests_share_texts_but_not_private_ones() -> None:
    segments = [
        (Segment(7, 0, 4), Segment(prompt_key(0), 0, 2)),
        (Segment(7, 0, 4), Segment(output_key(0), 0, 3), Segment(prompt_key(1), 0, 1)),
    ]
    trace = Trace(
        "t", "columns", np.zeros(2, np.int64), np.array([6, 8]), np.array([3, 3]), segments
    )
    rows = {"uid": np.arange(2), "replica": np.zeros(2, np.int64)}
    sample = typical_requests(rows, trace, {})
    taken = list(islice(sample.requests, 6))
    assert [r.uid for r in taken] == [0, 1, 2, 3, 4, 5]
    for number, request in enumerate(taken):
        first = number - number % 2
        assert request.segments is not None
        assert request.segments[0] == Segment(7, 0, 4)
        private = [part.content for part in request.segments[1:]]
        assert (
            private == ([prompt_key(first)], [output_key(first), prompt_key(first + 1)])[number % 2]
        )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gpu": "h100", "engine": {"max_num_seqs": 64}}])
def test_queues_grow_above_the_measured_capacity_and_not_below(options: dict[str, object]) -> None:
    """The estimate comes from a light load; the rate at which it breaks is then looked for."""
    light = simulate(generate=f"poisson:rate=0.5,n=3000,{LENGTHS}", **options).summary
    assert light["stability"]["verdict"] == "stable"
    capacity = light["stability"]["capacity_requests_per_s"]
    for load, verdict in ((0.93, "near-capacity"), (1.1, "unstable")):
        workload = f"poisson:rate={capacity * load},n=12000,{LENGTHS}"
        found = simulate(generate=workload, **options).summary["stability"]
        assert found["verdict"] == verdict
        if load > 1:
            # Not exactly: on the way there the batch is not full yet, and may be more efficient.
            assert found["served_requests_per_s"] == pytest.approx(capacity, rel=0.12)


def test_the_capacity_is_the_same_however_steps_are_walked() -> None:
    """Also where most requests are turned away: the measurement ends as one is done."""
    fast, walked = (
        simulate(
            generate="constant:rate=10,n=50,prompt=uniform(1,3000),output=17",
            engine={"num_gpu_blocks": 2, "block_size": 128, "enable_prefix_caching": False},
            fast_forward=fast_forward,
            seed=2,
        ).summary["stability"]
        for fast_forward in (True, False)
    )
    assert fast == walked


def test_requests_of_a_million_tokens_do_not_take_minutes() -> None:
    """The measurement is cut short, not the run."""
    result = simulate(
        generate="constant:rate=1,n=2,prompt=10,output=500000",
        engine={"max_model_len": 1_000_000, "num_gpu_blocks": 100_000},
    )
    stability = result.summary["stability"]
    assert stability["capacity_probe_requests"] < MIN_WINDOW / 100
    assert stability["capacity_requests_per_s"] > 0
    assert result.cpu_s < 20
