"""Steps like those of real traffic, made by the real scheduler, to calibrate on.

Steps of random shapes mislead: real traffic reuses the blocks it has just freed, decodes the same
sequences step after step, and mixes chunks with decodes in its own proportions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.engine.clock import work_clock
from calibrate.engine.executor import MeasuredStep, RealExecutor
from sim.engine.config import EngineConfig
from sim.engine.executor import step_shape
from sim.engine.scheduler import Scheduler
from sim.engine.sequence import Sequence as Seq
from sim.request import Request

MOST_WALL = 4.0


@dataclass(frozen=True)
class Mix:
    """Lengths of a synthetic workload: lognormal by median and 90th percentile, cut at the most."""

    prompt_median: float = 150.0
    prompt_p90: float = 500.0
    prompt_max: int = 1500
    output_median: float = 20.0
    output_p90: float = 60.0
    output_max: int = 200

    def prompt(self, rng: np.random.Generator) -> int:
        return _lognormal(rng, self.prompt_median, self.prompt_p90, self.prompt_max)

    def output(self, rng: np.random.Generator) -> int:
        return _lognormal(rng, self.output_median, self.output_p90, self.output_max)


def _lognormal(rng: np.random.Generator, median: float, p90: float, most: int) -> int:
    sigma = np.log(p90 / median) / 1.2816
    return int(np.clip(round(median * np.exp(sigma * rng.standard_normal())), 1, most))


def run_traffic(
    executor: RealExecutor,
    config: EngineConfig,
    mix: Mix,
    *,
    levels: Sequence[int],
    budget_s: float,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> list[MeasuredStep]:
    """Serve a closed loop of synthetic requests until the budget is spent, going round the
    concurrency `levels` (ascending) up and down, a slice of the time each; in several rounds when
    there is time, so that drift of the machine meets all levels alike. Returns the measured steps,
    the warm-up left out.

    The budget is counted on the device's clock, and no more than `MOST_WALL` times it in real
    time: on a machine shared with others a CPU's own time passes more slowly.
    """
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(config)
    clock = work_clock(executor.runner.decoder.weights.device)
    begin, latest = clock(), time.monotonic() + MOST_WALL * budget_s
    # Up and down again: a level is reached from its neighbours, without waiting for a drain.
    tour = [*levels, *levels[-2:0:-1]]
    rounds = max(1, min(4, int(budget_s / (0.5 * len(tour)))))
    slot_s = budget_s / (rounds * len(tour))
    uid, warm = 0, 0
    while (elapsed := (clock() - begin) / 1e9) < budget_s and time.monotonic() < latest:
        level = tour[int(elapsed / slot_s) % len(tour)]
        while scheduler.num_waiting + scheduler.num_running < level:
            scheduler.add(Seq(_request(uid, rng, mix, config)))
            uid += 1
            # One arrival a step, as an open system has them; but fill up quickly after a change.
            if scheduler.num_running + 4 >= level:
                break
        plan = scheduler.schedule()
        if plan:
            outcome = executor.execute(plan, step_shape(plan))
            scheduler.update(plan, outcome.sampled)
            if outcome.drafts is not None:
                scheduler.update_drafts(plan, outcome.drafts)
        if not warm and elapsed > 0.03 * budget_s:
            warm = len(executor.steps)
        if progress is not None:
            progress(min(1.0, elapsed / budget_s))
    executor.runner.texts.clear()  # of requests that were cut off
    return executor.steps[warm:]


def warm_up(executor: RealExecutor, config: EngineConfig) -> None:
    """Serve requests of many sizes, so that kernels are compiled and tuned before anything is
    timed. Leaves no steps behind. On a GPU this takes tens of seconds the first time."""
    scheduler = Scheduler(config)
    longest = min(config.max_model_len, config.num_usable_blocks * config.block_size) - 8
    prompts = [min(n, longest) for n in (8, 40, 150, 600, 1500, 3000, longest)]
    crowd = [16] * config.max_num_seqs
    for uid, prompt in enumerate([*prompts, *prompts, *crowd]):
        request = Request(uid, str(uid), uid, prompt, 1 + uid % 4)
        scheduler.add(Seq(request))
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        outcome = executor.execute(plan, step_shape(plan))
        scheduler.update(plan, outcome.sampled)
        if outcome.drafts is not None:
            scheduler.update_drafts(plan, outcome.drafts)
    executor.steps.clear()
    executor.runner.texts.clear()


def _request(uid: int, rng: np.random.Generator, mix: Mix, config: EngineConfig) -> Request:
    room = min(config.max_model_len, config.num_usable_blocks * config.block_size)
    output = min(mix.output(rng), room // 2)
    prompt = min(mix.prompt(rng), room - output - 1)
    return Request(uid=uid, id=str(uid), arrival_ns=uid, prompt_tokens=prompt, output_tokens=output)
