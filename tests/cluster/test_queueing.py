"""Against closed forms: a lone request to the nanosecond, M/D/1 and M/G/1 queues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim import Scenario, Simulation
from sim.cost.interface import StepShape
from sim.request import Request, Trace
from tests.checks import check_conservation

BARE: dict[str, Any] = {
    "cost": {"frontend": "none", "host_zero": True},
    "engine": {"async_scheduling": False, "max_num_seqs": 1, "enable_prefix_caching": False},
    "capacity_probe": False,
}


def trace_of(arrival_ns: np.ndarray, prompt: np.ndarray, output: np.ndarray) -> Trace:
    return Trace("t", "columns", arrival_ns, prompt, output)


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (100, 1), (1, 7), (1234, 321), (5000, 40)])
def test_a_lone_request_takes_the_sum_of_its_steps(
    prompt: int, output: int, fast_forward: bool
) -> None:
    """Synchronous, host time zero: prefill chunks of the token budget, then the decodes."""
    simulation = Simulation(Scenario.of(**BARE, fast_forward=fast_forward))
    simulation.submit(Request(0, "a", 12_345, prompt, output))
    simulation.run()
    rows = simulation.result().rows
    cost, budget = simulation.system.cost, simulation.system.config.max_num_batched_tokens
    now = 12_345
    for done in range(0, prompt, budget):
        tokens = min(budget, prompt - done)
        last = done + tokens == prompt
        now += cost.step_ns(StepShape(0, 0, 0, [(tokens, done)], int(last)))
    assert rows["first_token_ns"].tolist() == [now]
    for token in range(1, output):
        context = prompt + token
        now += cost.step_ns(StepShape(1, context, context**2, (), 1))
    assert rows["finish_ns"].tolist() == [now]


def waits(seed: int, load: float, prompt: np.ndarray) -> tuple[float, float, float]:
    """(mean wait simulated, E[S], E[S^2]), seconds, of one-token requests at one slot."""
    simulation = Simulation(Scenario.of(**BARE))
    cost = simulation.system.cost
    sizes = np.unique(prompt)
    each = {int(p): cost.step_ns(StepShape(0, 0, 0, [(int(p), 0)], 1)) for p in sizes}
    service = np.array([each[int(p)] for p in prompt]) / 1e9
    mean = float(service.mean())
    gaps = np.random.default_rng(seed).exponential(mean / load, len(prompt))
    trace = trace_of(
        np.rint(np.cumsum(gaps) * 1e9).astype(np.int64), prompt, np.ones(len(prompt), np.int64)
    )
    simulation.serve(trace)
    simulation.run()
    result = simulation.result()
    check_conservation(simulation, result)
    return float(result.requests["queue_s"].mean()), mean, float((service**2).mean())


@pytest.mark.parametrize("load", [0.3, 0.7])
@pytest.mark.parametrize("kind", ["M/D/1", "M/G/1"])
def test_mean_wait_is_pollaczek_khinchine(kind: str, load: float) -> None:
    """W = lambda E[S^2] / (2 (1 - rho)), within the confidence interval over replications."""
    n, replications = 4000, 10
    errors = []
    for seed in range(replications):
        if kind == "M/D/1":
            prompt = np.full(n, 1000)
        else:
            prompt = np.random.default_rng(1000 + seed).integers(1, 2049, n)
        wait, mean, square = waits(seed, load, prompt)
        expected = (load / mean) * square / (2 * (1 - load))
        errors.append(wait / expected - 1)
    mean_error = float(np.mean(errors))
    half_width = 3.69 * float(np.std(errors, ddof=1)) / replications**0.5  # t(9) at 99.5 %
    assert abs(mean_error) <= half_width
    assert half_width < 0.2
