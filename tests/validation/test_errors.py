"""The error table and the peers beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibrate.validation.errors import beside_peers, compare, in_headline, table
from calibrate.validation.experiments import load_experiments
from calibrate.validation.measured import measured_values, peer_errors
from calibrate.validation.outcome import METRICS
from calibrate.validation.report import write_predictions
from tests.validation.test_experiments import entry, write

MEASURED = {
    "stages": [
        {"stage": 0, "ttft_ms": {"mean": 20, "p50": None}, "tpot_ms": {"mean": 10}},
        {
            "stage": 1,
            "ttft_ms": {"mean": 40},
            "tpot_ms": {"mean": 12},
            "num_failed": 3,
            "num_requests": 12,
            "throughput": {"req_per_s": 5.0},
        },
    ],
    "summary": {"ttft_ms": {"mean": 30}, "tpot_ms": {"mean": 11}},
}


def test_measurements_have_the_names_of_predictions(tmp_path: Path) -> None:
    (experiment,) = load_experiments(write(tmp_path, entry(measured=MEASURED)))
    values = measured_values(experiment)
    assert values[0, "ttft_mean"] == 20
    assert values[-1, "tpot_mean"] == 11
    assert values[1, "fail_frac"] == 0.25
    assert values[1, "req_per_s"] == 5
    assert (0, "ttft_p50") not in values
    assert {metric for _, metric in values} <= set(METRICS)


def test_one_stage_is_the_whole_run(tmp_path: Path) -> None:
    measured = {"stages": [{"tpot_ms": {"mean": 10}, "makespan_s": 60.0}]}
    (experiment,) = load_experiments(write(tmp_path, entry(measured=measured)))
    assert measured_values(experiment)[-1, "makespan_s"] == 60.0


def test_table_groups_by_family_and_regime(tmp_path: Path) -> None:
    experiments = load_experiments(
        write(
            tmp_path,
            entry(id="is-a", measured=MEASURED),
            entry(id="is-b", measured=MEASURED),
            entry(id="s2r-c", measured=MEASURED, regime="overloaded"),
            entry(id="kubecon-d", measured=MEASURED, regime="sweep from idle to saturated"),
            entry(id="is-e"),
        )
    )
    good = {key: 1.1 * value for key, value in measured_values(experiments[0]).items()}
    comparisons = [c for e in experiments for c in compare(e, good)]
    rows = {(r.group, r.metric): r for r in table(experiments, comparisons)}
    headline = rows["stable + near capacity", "tpot_mean"]
    assert headline.n == 2
    assert headline.median == pytest.approx(10.0)
    assert rows["s2r, overloaded", "tpot_mean"].n == 1
    assert rows["saturated throughput", "req_per_s"].n == 1
    assert rows["kubecon, stages below capacity", "ttft_mean"].n == 2
    assert in_headline(experiments) == ["is-a", "is-b"]


def test_peers_are_compared_on_the_runs_they_published(tmp_path: Path) -> None:
    experiments = load_experiments(write(tmp_path, entry(id="is-a", measured=MEASURED)))
    path = tmp_path / "peers.csv"
    path.write_text(
        "simulator,experiment,split,stage,metric,predicted,actual,actual_corrected\n"
        "other,is-a,open,-1,itl_mean,13.2,99,11\n"
        "other,is-a,open,0,itl_mean,1,99,10\n"
        "other,is-a,open,-1,ttft_mean,60,30,\n"
        "other,is-b,open,-1,ttft_mean,60,30,\n"
    )
    ours = compare(experiments[0], {(-1, "tpot_mean"): 11.0, (-1, "ttft_mean"): 33.0})
    (line,) = beside_peers(ours, peer_errors(path), ["is-a"])
    assert line["n"] == 1
    assert line["tpot_mean"]["median"] == pytest.approx(20.0)
    assert line["tpot_mean"]["our_median"] == pytest.approx(0.0)
    assert line["ttft_mean"]["median"] == pytest.approx(100.0)
    assert line["ttft_mean"]["our_median"] == pytest.approx(10.0)


def test_predictions_file_has_one_value_per_row(tmp_path: Path) -> None:
    values = {(-1, metric): 1.5 for metric in METRICS} | {(-1, "ttft_p99"): float("nan")}
    path = tmp_path / "preds.csv"
    write_predictions(path, {"is-a": values})
    lines = path.read_text().splitlines()
    assert lines[0] == "experiment,stage,metric,value"
    assert "is-a,-1,ttft_mean,1.5" in lines
    assert len(lines) == len(METRICS)  # the header, and all but the one that is not known
