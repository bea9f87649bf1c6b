"""Prediction against measurement, by family and regime, with the peers beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.validation.experiments import Experiment
from calibrate.validation.measured import WHOLE_RUN, PeerError, measured_values
from calibrate.validation.outcome import METRICS, Values

HEADLINE = ("tpot_mean", "e2e_mean", "e2e_p90", "ttft_mean")
STABLE = ("stable", "near_capacity")
SATURATED_STAGES = (4, 5, 6)
"""Of the load sweeps: there the client is a closed loop, and only its throughput says something."""


@dataclass(frozen=True)
class Comparison:
    """One metric of one stage of one experiment; stage -1 is the whole run."""

    experiment: str
    stage: int
    metric: str
    predicted: float
    measured: float

    @property
    def percent(self) -> float:
        """Signed error; for fractions the difference in percentage points."""
        if self.metric == "fail_frac":
            return 100.0 * (self.predicted - self.measured)
        return 100.0 * (self.predicted / self.measured - 1.0)


def compare(experiment: Experiment, predicted: Values) -> list[Comparison]:
    """Every measured value beside its prediction, NaN where nothing could be predicted."""
    return [
        Comparison(experiment.id, stage, metric, predicted.get((stage, metric), np.nan), value)
        for (stage, metric), value in measured_values(experiment).items()
        if metric == "fail_frac" or value > 0
    ]


@dataclass(frozen=True)
class Row:
    """Absolute errors of one metric over a group of runs, per cent."""

    group: str
    metric: str
    n: int
    median: float
    mean: float
    worst: float
    worst_at: str

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__.copy()


def table(experiments: Sequence[Experiment], comparisons: Iterable[Comparison]) -> list[Row]:
    """The error table: the headline of stable and near-capacity runs, each family and regime,
    stages of the load sweeps, and saturated throughput."""
    by_id = {e.id: e for e in experiments}
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for c in comparisons:
        for group in _groups(by_id[c.experiment], c):
            groups.setdefault((group, c.metric), []).append(c)
    order = {name: i for i, name in enumerate(_GROUP_ORDER)}
    ranked = sorted(
        groups.items(),
        key=lambda item: (
            order.get(item[0][0], len(order)),
            item[0][0],
            METRICS.index(item[0][1]),
        ),
    )
    return [_row(group, metric, members) for (group, metric), members in ranked]


HEADLINE_GROUP = "stable + near capacity"
SATURATED_GROUP = "saturated throughput"
_GROUP_ORDER = (HEADLINE_GROUP, SATURATED_GROUP)


def _groups(experiment: Experiment, c: Comparison) -> list[str]:
    """The lines of the table that this value counts in."""
    family, regime = experiment.family, experiment.regime or "?"
    if regime.startswith("sweep"):
        if c.stage == WHOLE_RUN:
            return []
        saturated = c.stage in SATURATED_STAGES
        if saturated:
            found = [f"{family}, saturated stages"]
            return [*found, SATURATED_GROUP] if c.metric == "req_per_s" else found
        return [f"{family}, stages below capacity"]
    if c.stage != WHOLE_RUN:
        # Overloaded runs publish their rate per stage.
        rate_of_stage = c.metric == "req_per_s" and regime == "overloaded"
        return [SATURATED_GROUP] if rate_of_stage and _last_stage(experiment, c.stage) else []
    found = [f"{family}, {regime}"]
    # The artifact runs (`lssart`) do not state their engine arguments: a line of their own.
    if regime in STABLE and family != "lssart":
        found.append(HEADLINE_GROUP)
    return found


def in_headline(experiments: Iterable[Experiment]) -> list[str]:
    """The measured stable and near-capacity runs that the headline counts."""
    return [
        e.id
        for e in experiments
        if e.measured is not None and e.regime in STABLE and e.family != "lssart"
    ]


def _last_stage(experiment: Experiment, stage: int) -> bool:
    stages = (experiment.measured or {}).get("stages") or []
    return stage == len(stages) - 1


def _row(group: str, metric: str, members: Sequence[Comparison]) -> Row:
    errors = np.array([abs(c.percent) for c in members])
    known = errors[~np.isnan(errors)]
    if not len(known):
        return Row(group, metric, len(members), np.nan, np.nan, np.nan, "")
    worst = members[int(np.nanargmax(errors))]
    stage = "" if worst.stage == WHOLE_RUN else f" stage {worst.stage}"
    return Row(
        group=group,
        metric=metric,
        n=len(members),
        median=float(np.median(known)),
        mean=float(known.mean()),
        worst=float(known.max()),
        worst_at=f"{worst.experiment}{stage} ({worst.percent:+.1f} %)",
    )


def beside_peers(
    ours: Iterable[Comparison], peers: Iterable[PeerError], runs: Iterable[str]
) -> list[Mapping[str, Any]]:
    """Per simulator: the runs among `runs` that it published, and its median and mean error for
    the headline metrics and p99 there, with ours on the same runs."""
    wanted = set(runs)
    mine = {
        (c.experiment, c.metric): abs(c.percent)
        for c in ours
        if c.stage == WHOLE_RUN and c.experiment in wanted
    }
    by_simulator: dict[str, list[PeerError]] = {}
    for peer in peers:
        if (peer.experiment, peer.metric) in mine:
            by_simulator.setdefault(peer.simulator, []).append(peer)
    found = []
    for simulator, errors in sorted(by_simulator.items()):
        line: dict[str, Any] = {
            "simulator": simulator,
            "n": len({e.experiment for e in errors}),
        }
        for metric in (*HEADLINE, "e2e_p99"):
            theirs = [abs(e.percent) for e in errors if e.metric == metric]
            same = [mine[e.experiment, metric] for e in errors if e.metric == metric]
            if theirs:
                line[metric] = {
                    "n": len(theirs),
                    "median": float(np.median(theirs)),
                    "mean": float(np.mean(theirs)),
                    "our_median": float(np.nanmedian(same)),
                    "our_mean": float(np.nanmean(same)),
                }
        found.append(line)
    return sorted(found, key=lambda line: -int(line["n"]))
