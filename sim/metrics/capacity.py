"""How many requests per second a replica can serve: its engine, kept saturated for a while."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sim.cost.interface import CostModel, StepShape
from sim.engine.interface import Engine, RequestRecord, Status
from sim.metrics.distribution import NS
from sim.request import Request

MIN_WINDOW = 1000
"""Fewest requests to measure."""
TURNOVERS = 4
"""Times the batch is replaced during the measurement, at least; half as often before it."""


CHUNK = 256
"""Prompt tokens for which the cost of one more is taken."""


@dataclass(frozen=True)
class Capacity:
    """What the saturated engine did in the measured window."""

    requests_per_s: float
    requests: int
    """Requests it is measured on."""
    mean_running: float
    prefill_tokens: float
    """Prompt tokens computed (cached ones do not count) per request, on average."""
    output_tokens: float

    def for_load(
        self, prefill_tokens: float, output_tokens: float, cost: CostModel, budget: int
    ) -> Capacity:
        """The rate for requests that need so many tokens on average, instead of those measured.

        The work of a request is taken as linear in both, with the costs of one more token at this
        batch; so only the small difference between sample and load rests on that. `budget`: most
        tokens of a step.
        """
        running = max(1, min(round(self.mean_running), budget // 2))
        chunk = min(CHUNK, budget - running)
        if chunk < 1:
            return self  # one token a step: every request costs the same per token
        context = round(self.prefill_tokens + self.output_tokens / 2) + 1
        decodes = StepShape(running, running * context, running * context**2, (), running)
        step_ns = cost.step_ns(decodes)
        mixed = replace(decodes, prefills=((chunk, 0),))
        per_prefill = max(0, cost.step_ns(mixed) - step_ns) / chunk
        per_output = step_ns / running
        ours = per_prefill * self.prefill_tokens + per_output * self.output_tokens
        theirs = per_prefill * prefill_tokens + per_output * output_tokens
        return replace(self, requests_per_s=self.requests_per_s * ours / theirs)


def measure_capacity(
    engine: Engine,
    source: Iterator[Request],
    backlog: int,
    window: int = MIN_WINDOW,
    turnovers: int = TURNOVERS,
) -> Capacity | None:
    """Feed requests so that `backlog` always wait, until the rate of leaving is known from at
    least `window` of them and `turnovers` of the batch.

    The engine must be fresh. The batch turns over before the measurement starts too, so that its
    requests are in all phases of their lives as they would be in the long run. Requests
    that the engine rejects count as served: they are part of the load. None when `source` ends
    before there is anything to measure.
    """
    left = finished = prefilled = generated = 0

    def on_finish(record: RequestRecord) -> None:
        nonlocal left, finished, prefilled, generated
        left += 1
        if record.status is Status.COMPLETED:
            finished += 1
            prefilled += record.request.prompt_tokens - record.cached_tokens
            generated += record.output_tokens

    engine.on_finish = on_finish
    now = begun_ns = 0
    area = peak = 0
    begun_left = begun_finished = begun_prefilled = begun_generated = 0
    measuring = False
    more = True
    while more:
        while engine.num_waiting < backlog:
            request = next(source, None)
            if request is None:
                more = False
                break
            engine.submit(request, now)
        wake = engine.wake_ns()
        if wake is None:
            break
        # Newcomers knock at the instant of the next step: no step under way is cut short.
        area += engine.num_running * (wake - now) if measuring else 0
        now = wake
        engine.advance(now)
        peak = max(peak, engine.num_running)
        if not measuring:
            if finished >= turnovers * peak / 2 > 0:
                measuring, begun_ns, begun_left = True, now, left
                begun_finished, begun_prefilled, begun_generated = finished, prefilled, generated
        elif left - begun_left >= max(window, turnovers * peak):
            break
    number = finished - begun_finished
    if not measuring or now == begun_ns or not number:
        return None
    elapsed = now - begun_ns
    return Capacity(
        requests_per_s=(left - begun_left) / (elapsed / NS),
        requests=left - begun_left,
        mean_running=area / elapsed,
        prefill_tokens=(prefilled - begun_prefilled) / number,
        output_tokens=(generated - begun_generated) / number,
    )
