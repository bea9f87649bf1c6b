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

FEWEST_STEPS = 40
"""Measured steps without which no fit is tried: a budget that a slow machine spends on fewer is
overrun, ..."""
MOST_OVERRUN = 5.0
"""... by this factor at most."""
MOST_WALL = 4.0
WARM_SHARE = 0.03
"""Part of the budget whose steps are not used."""
VISIT_SHARE = 0.01
"""Part of the budget that a visit to one concurrency decodes for, ..."""
VISIT_WHOLE = 4
"""... unless it takes this many times as long with the prefills in between, ..."""
VISIT_STEPS = 8
"""... but steps without prefill that it must have."""


@dataclass
class Visit:
    """Counts the steps at one concurrency, from the first that only decoded."""

    needed_s: float
    _steps: int = 0
    _decode_ns: int = 0
    _ns: int = 0

    def reset(self) -> None:
        self._steps = self._decode_ns = self._ns = 0

    def add(self, ns: int, decodes_alone: bool) -> None:
        """One more step; whether it decoded at this concurrency and did nothing else."""
        if decodes_alone:
            self._steps += 1
            self._decode_ns += ns
        if self._steps:
            self._ns += ns

    @property
    def done(self) -> bool:
        most = max(self._decode_ns, self._ns / VISIT_WHOLE)
        return self._steps >= VISIT_STEPS and most >= 1e9 * self.needed_s


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
    """Serve a closed loop of synthetic requests until the budget is spent. Returns the measured
    steps, the warm-up left out.

    The loop climbs through the concurrency `levels` (ascending), stays at each for a visit, lets
    the requests drain, and climbs again, up to four times as far; after the highest level from
    the start. So the machine's drift meets low levels, where an open system is most of the time,
    again and again, and a short budget leaves out the highest. A visit is counted in steps that
    only decode: on a slow processor the prefills on the way cost most of the budget, and no level
    must be passed over for them. Draining measures what lies between the levels without prefills.

    The budget is counted on the device's clock, and no more than `MOST_WALL` times it in real
    time: on a machine shared with others a CPU's own time passes more slowly. Where it is too
    short for `FEWEST_STEPS` the loop goes on for them, up to `MOST_OVERRUN` times as long.
    """
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(config)
    clock = work_clock(executor.runner.decoder.weights.device)
    begin, begin_wall = clock(), time.monotonic()
    visit = Visit(VISIT_SHARE * budget_s)
    climbs = _climbs(levels)
    climb, at, uid, warm = 0, 0, 0, 0
    while True:
        elapsed = (clock() - begin) / 1e9
        spent = max(elapsed, (time.monotonic() - begin_wall) / MOST_WALL) / budget_s
        enough = warm > 0 and len(executor.steps) - warm >= FEWEST_STEPS
        if spent >= (1.0 if enough else MOST_OVERRUN):
            break
        if at == len(climbs[climb]) and scheduler.num_running <= levels[0]:
            climb, at = (climb + 1) % len(climbs), 0
        level = climbs[climb][at] if at < len(climbs[climb]) else 0
        while scheduler.num_waiting + scheduler.num_running < level:
            scheduler.add(Seq(_request(uid, rng, mix, config)))
            uid += 1
            # One arrival a step, as an open system has them; but fill up quickly after a change.
            if scheduler.num_running + 4 >= level:
                break
        plan = scheduler.schedule()
        if plan:
            shape = step_shape(plan)
            outcome = executor.execute(plan, shape)
            scheduler.update(plan, outcome.sampled)
            if outcome.drafts is not None:
                scheduler.update_drafts(plan, outcome.drafts)
            # Requests that still wait have no room: the level cannot be reached.
            there = shape.num_decodes + scheduler.num_waiting >= level > 0
            visit.add(outcome.stages_ns[-1], there and not shape.prefills)
        if not warm and elapsed > WARM_SHARE * budget_s:
            # What was counted until now is thrown away: the first level is visited anew.
            warm = len(executor.steps)
            visit.reset()
            climb, at = 0, 0
        elif warm and visit.done:
            visit.reset()
            at += 1
        if progress is not None:
            progress(min(1.0, elapsed / budget_s))
    executor.runner.texts.clear()  # of requests that were cut off
    return executor.steps[warm:]


def _climbs(levels: Sequence[int]) -> list[Sequence[int]]:
    """The levels of each climb: up to 4, 16, 64, ..., all."""
    found, peak = [], 4
    while peak < levels[-1]:
        found.append([n for n in levels if n <= peak] or levels[:1])
        peak *= 4
    return [*found, levels]


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
