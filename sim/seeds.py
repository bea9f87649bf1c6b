"""Several runs that differ in their seed only, and what they say together.

The interval is Student's t for the mean of independent runs. It covers what the seed draws, and
nothing else: not the error of the cost model, and not that another day has another trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from sim.errors import UserError
from sim.registry import POLICIES, policy_class
from sim.scenario import Scenario

CONFIDENCE = 0.95
MOST = 1000
_SECTIONS = (
    "requests", "ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s",
    "throughput", "goodput", "stability", "time", "kv", "cost_model",
)  # fmt: skip
"""Of the summary: those with numbers that a run finds."""


@dataclass(frozen=True)
class Replication:
    """Which seeds, and what they change."""

    seeds: Sequence[int]
    draws: Sequence[str]
    """What draws random numbers, in words; nothing: all seeds give the same."""
    draws_requests: bool

    @classmethod
    def of(cls, scenario: Scenario, number: str) -> Replication:
        """`number` seeds from the scenario's own on. Raises UserError."""
        if not number.isascii() or not number.isdigit() or not 2 <= int(number) <= MOST:
            raise UserError(
                f"--seeds must be a whole number from 2 to {MOST} (an interval needs 2 runs), "
                f"got {number!r}"
            )
        if scenario.execute.device is not None:
            raise UserError(
                "--seeds repeats a simulation; what varies in --execute is the measurement, not "
                "the seed: run the command again instead"
            )
        requests = []
        if scenario.generate is not None:
            requests.append("the generated requests")
        if scenario.trace is not None and scenario.trace.arrivals is not None:
            requests.append(f"arrivals ({scenario.trace.arrivals})")
        seeds = range(scenario.seed, scenario.seed + int(number))
        return cls(seeds, [*requests, *_drawn_by_the_system(scenario)], bool(requests))

    @property
    def to_run(self) -> Sequence[int]:
        """One run stands for all where nothing is random."""
        return self.seeds if self.draws else self.seeds[:1]

    @property
    def sentence(self) -> str:
        if self.draws:
            return (
                f"the seed draws {', '.join(self.draws)}; everything else is the same in each run"
            )
        return (
            f"one run stands for all {len(self.seeds)}: nothing here depends on the seed (a trace "
            f"file has its own requests, and no policy draws numbers), so there is no interval"
        )

    def combine(self, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The document of `simulate --seeds --json`, from the summaries of `to_run`."""
        found = [dict(_numbers(run)) for run in runs]
        return {
            "seeds": {
                "values": list(self.seeds),
                "runs": len(runs),
                "draws": list(self.draws),
                "sentence": self.sentence,
                "confidence": CONFIDENCE,
            },
            "verdicts": dict(Counter(run["stability"]["verdict"] for run in runs)),
            "metrics": {
                name: _estimate([v for one in found if (v := one[name]) is not None])
                for name in found[0]
            },
            "runs": list(runs),
        }


def _drawn_by_the_system(scenario: Scenario) -> Iterator[str]:
    """Policies get their random numbers by `prepare`; a user's own may have them from elsewhere."""
    kinds = {"scheduling": "policy", **{k: k for k in POLICIES if k != "scheduling"}}
    for kind, field in kinds.items():
        name = getattr(scenario, field).name
        owners = [c for c in policy_class(kind, name).__mro__ if "prepare" in vars(c)]
        if ":" in name or len(owners) > 1:  # the protocol's own does nothing
            yield f"{kind} ({name})"
    if scenario.engine.get("num_speculative_tokens"):
        yield "accepted drafts"


def _numbers(tree: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """(dotted path, value) of every number of a summary whose key is in every summary."""
    for section in _SECTIONS:
        yield from _below(section, tree[section])


def _below(path: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            if not name.endswith("_by_reason") and name != "server":
                yield from _below(f"{path}.{name}", value)
        elif value is None or isinstance(value, int | float):
            yield f"{path}.{name}", value


def _estimate(values: Sequence[float]) -> dict[str, float | int | None]:
    """Mean, interval of the mean, and extremes of the runs that have a value."""
    if not values:
        return {
            "mean": None, "ci95_half_width": None, "ci95_low": None, "ci95_high": None,
            "min": None, "max": None, "runs": 0,
        }  # fmt: skip
    mean, half = fmean(values), None
    if len(values) > 1:
        from scipy.special import stdtrit

        quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
        half = quantile * stdev(values) / sqrt(len(values))
    return {
        "mean": mean,
        "ci95_half_width": half,
        "ci95_low": None if half is None else mean - half,
        "ci95_high": None if half is None else mean + half,
        "min": min(values),
        "max": max(values),
        "runs": len(values),
    }
