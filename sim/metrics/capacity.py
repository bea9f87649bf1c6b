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
MOST_STEPS = 300_000
"""Steps (of a lone decode's length) that each half of the measurement may take. Requests of
millions of tokens would take minutes."""
CHUNK = 256
"""Prompt tokens for which the cost of one more is taken."""


@dataclass(frozen=True)
class Saturated:
    """What a saturated engine did, in tokens: how many requests that is depends on the requests."""

    prefill_tokens_per_s: float
    """Prompt tokens computed; cached ones and what preemption made it compute again left out."""
    output_tokens_per_s: float
    mean_running: float
    mean_context: float
    """Tokens that a decoding request attends to."""
    requests: int
    """Requests that left meanwhile."""

    def requests_per_s(
        self, prefill_tokens: float, output_tokens: float, cost: CostModel, budget: int
    ) -> float:
        """The rate for requests that need so many tokens on average.

        The work of a request is taken as linear in both, with the costs of one more token at this
        batch; that matters only as far as the tokens measured are mixed differently. `budget`:
        most tokens of a step.
        """
        running = max(1, min(round(self.mean_running), budget // 2))
        chunk = max(1, min(CHUNK, budget - running))
        context = round(self.mean_context) + 1
        decodes = StepShape(running, running * context, running * context**2, (), running)
        step_ns = cost.step_ns(decodes)
        per_output = step_ns / running
        per_prefill = per_output
        if running + chunk <= budget:
            mixed = replace(decodes, prefills=((chunk, 0),))
            per_prefill = max(1, cost.step_ns(mixed) - step_ns) / chunk
        done = per_prefill * self.prefill_tokens_per_s + per_output * self.output_tokens_per_s
        return done / (per_prefill * prefill_tokens + per_output * output_tokens)


def saturate(
    engine: Engine,
    source: Iterator[Request],
    backlog: int,
    window: int = MIN_WINDOW,
    turnovers: int = TURNOVERS,
    longest_ns: int = 1 << 62,
) -> Saturated | None:
    """Feed requests so that `backlog` always wait, until at least `window` of them and
    `turnovers` of the batch have left, or one leaves after more than `longest_ns` of measuring.

    The engine must be fresh. The batch turns over before the measurement starts too, so that its
    requests are in all phases of their lives. None when `source` ends before there is anything to
    measure.
    """
    left = finished = generated = again = 0

    def on_finish(record: RequestRecord) -> None:
        nonlocal left, finished, generated, again
        left += 1
        finished += record.status is Status.COMPLETED
        generated += record.output_tokens
        again += record.recomputed_tokens

    def output_so_far() -> int:
        return generated + sum(record.output_tokens for record in engine.drain(now))

    engine.on_finish = on_finish
    now = begun_ns = area = peak = 0
    begun_left = begun_output = begun_again = 0
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
        now, before = wake, finished
        engine.advance(now)
        peak = max(peak, engine.num_running)
        # Only as a request is done, when every engine wakes, however it walks.
        late = finished > before and now - begun_ns > longest_ns
        if not measuring:
            if late or finished >= turnovers * peak / 2 > 0:
                measuring, begun_ns = True, now
                begun_left, begun_output, begun_again = left, output_so_far(), again
        elif late or (finished > before and left - begun_left >= max(window, turnovers * peak)):
            break
    if not measuring or now == begun_ns:
        return None
    output = output_so_far() - begun_output  # has the engine settle its log, too
    table = engine.log.table()
    rows = (table["end_ns"] > begun_ns) & (table["end_ns"] <= now)
    decodes = int(table["num_decodes"][rows].sum())
    elapsed_s = (now - begun_ns) / NS
    return Saturated(
        prefill_tokens_per_s=(int(table["prefill_tokens"][rows].sum()) - again + begun_again)
        / elapsed_s,
        output_tokens_per_s=output / elapsed_s,
        mean_running=area / (now - begun_ns),
        mean_context=int(table["decode_context"][rows].sum()) / max(decodes, 1),
        requests=left - begun_left,
    )


@dataclass(frozen=True)
class Capacity:
    """What one replica can serve."""

    requests_per_s: float
    requests: int
    """Requests it was measured on."""
