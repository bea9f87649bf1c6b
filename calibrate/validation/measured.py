"""What was measured in the open experiments, and what other simulators predicted for them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.validation.experiments import Experiment, Json
from calibrate.validation.outcome import LATENCIES, STATISTICS, Values
from sim.errors import UserError

WHOLE_RUN = -1


def measured_values(experiment: Experiment) -> Values:
    """The measurements under the names of our predictions; empty where they are withheld.

    Output tokens and TPOT are the corrected ones. A run of one stage has the same values for the
    stage and the whole.
    """
    if experiment.measured is None:
        return {}
    try:
        return _measured_values(experiment.measured)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"experiment {experiment.id}: measured values: {error}") from None


def _measured_values(measured: Json) -> Values:
    found: Values = {}
    stages = measured.get("stages") or []
    for number, stage in enumerate(stages):
        _latencies(found, int(stage.get("stage", number)), stage)
        _throughput(found, int(stage.get("stage", number)), stage)
    summary = measured.get("summary")
    if summary:
        _latencies(found, WHOLE_RUN, summary)
    if len(stages) == 1:
        for (_, metric), value in list(found.items()):
            found.setdefault((WHOLE_RUN, metric), value)
    return found


def _latencies(found: Values, stage: int, entry: Json) -> None:
    for latency in LATENCIES:
        for statistic in STATISTICS:
            value = (entry.get(f"{latency}_ms") or {}).get(statistic)
            if value is not None:
                found[stage, f"{latency}_{statistic}"] = float(value)


def _throughput(found: Values, stage: int, entry: Json) -> None:
    rates = entry.get("throughput") or {}
    for metric, names in {
        "req_per_s": ("req_per_s",),
        "output_tok_per_s": ("output_tok_per_s", "output_tok_per_s_from_makespan"),
    }.items():
        value = next((rates[n] for n in names if rates.get(n) is not None), None)
        if value is not None:
            found[stage, metric] = float(value)
    span = entry.get("makespan_s", entry.get("makespan_s_1s_resolution"))
    if span is not None:
        found[stage, "makespan_s"] = float(span)
    if entry.get("num_failed") is not None and entry.get("num_requests"):
        found[stage, "fail_frac"] = entry["num_failed"] / entry["num_requests"]


@dataclass(frozen=True)
class PeerError:
    """One published prediction of another simulator, whole run."""

    simulator: str
    experiment: str
    metric: str
    percent: float
    """Signed error, against the corrected measurement where there is one."""


def peer_errors(path: Path) -> list[PeerError]:
    """Whole-run errors of the simulators in `peer_errors_open.csv`; inter-token latencies count as
    TPOT, against the corrected measurement."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["stage"] == str(WHOLE_RUN)]
        return [error for error in map(_peer_error, rows) if error is not None]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: not a table of peer errors ({error})") from None


def _peer_error(row: Mapping[str, Any]) -> PeerError | None:
    truth = float(row["actual_corrected"] or row["actual"] or 0.0)
    if not row["predicted"] or not truth:
        return None
    metric = row["metric"].replace("itl_", "tpot_")
    percent = 100.0 * (float(row["predicted"]) / truth - 1.0)
    return PeerError(row["simulator"], row["experiment"], metric, percent)
