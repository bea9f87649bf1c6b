"""Timing: the median of warm calls, inputs in turn, and a noisy point that says so."""

from __future__ import annotations

import time

import pytest
import torch

from calibrate.timing import measure, summarise


def spin(us: float) -> None:
    end = time.perf_counter_ns() + us * 1e3
    while time.perf_counter_ns() < end:
        pass


def test_measure_finds_the_duration_of_a_call():
    timing = measure([lambda: spin(300)], budget_s=0.05, warm_up_s=0.01)
    assert 295 < timing.us < 600
    assert timing.samples >= 5
    assert timing.method == "clock"


def test_measure_uses_its_inputs_in_turn_and_warms_them_up():
    seen: list[int] = []
    calls = [lambda i=i: seen.append(i) or spin(50) for i in range(3)]
    measure(calls, budget_s=0.0, warm_up_s=0.0, retries=0)
    assert seen[:3] == [0, 1, 2]
    assert seen[3:6] == [0, 1, 2]


def test_short_calls_are_timed_several_at_a_time():
    timing = measure([lambda: None], budget_s=0.01, warm_up_s=0.005)
    assert timing.us < 5


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ([10.0] * 20, ""),
        ([10.0, 20.0] * 10, "spread"),
        ([10.0] * 10 + [14.0] * 10, "drift"),
        ([10.0] * 3, "only 3 samples"),
    ],
)
def test_a_noisy_point_says_so(samples, why):
    timing = summarise(samples, "cpu", "clock")
    assert bool(timing.noisy) == bool(why)
    assert why in timing.noisy
    assert ("NOISY" in str(timing)) == bool(why)


def test_outliers_do_not_move_the_median():
    timing = summarise([10.0] * 19 + [500.0], "cpu", "clock")
    assert timing.us == 10.0
    assert not timing.noisy
    assert timing.mean_us > 30


def test_measure_refuses_what_it_cannot_time():
    with pytest.raises(ValueError, match="nothing to measure"):
        measure([])
    with pytest.raises(ValueError, match="'graph' does not time calls on cpu"):
        measure([lambda: None], "cpu", method="graph")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["graph", "events"])
def test_cuda_times_grow_with_the_work(method):
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    small, large = (torch.empty(n, device="cuda") for n in (1 << 24, 1 << 27))
    times = [measure([x.zero_], "cuda", method=method).us for x in (small, large)]
    assert 4 < times[1] / times[0] < 12
