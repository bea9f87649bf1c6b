"""`validate deployments`, run as a user runs it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from calibrate.validate_cli import main
from calibrate.validation.experiments import load_experiments
from calibrate.validation.outcome import METRICS
from calibrate.validation.runs import predict
from tests.validation.test_errors import MEASURED
from tests.validation.test_experiments import entry, write


def test_writes_predictions_and_prints_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, entry(measured=MEASURED), entry(id="is-held-out"))
    out = tmp_path / "preds.csv"
    assert main(["deployments", str(file), "--out", str(out), "--seeds", "2", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    assert "2 experiments simulated" in text
    assert "stable + near capacity" in text
    rows = list(csv.DictReader(out.open()))
    assert {r["experiment"] for r in rows} == {"is-tiny", "is-held-out"}
    assert {r["stage"] for r in rows} == {"-1", "0", "1"}
    assert {r["metric"] for r in rows} == set(METRICS)
    assert all(float(r["value"]) >= 0 for r in rows)


def test_json_is_one_document_and_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, entry(measured=MEASURED), entry(id="is-held-out"))
    documents = []
    for _ in range(2):
        command = ["deployments", str(file), "--seeds", "1", "--jobs", "1", "--json"]
        assert main([*command, "--only", "tiny"]) == 0
        documents.append(capsys.readouterr().out)
    assert documents[0] == documents[1]
    tree = json.loads(documents[0])
    assert [p["experiment"] for p in tree["predictions"]] == ["is-tiny"]
    assert tree["predictions"][0]["notes"]["kv_blocks_from"] == "stated"
    assert tree["errors"][0]["group"] == "stable + near capacity"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere.json"], "nowhere.json: cannot be read"),
        (["FILE", "--seeds", "0"], "--seeds must be at least 1"),
        (["FILE", "--only", "zzz"], "matches none"),
        (["FILE", "--out", "/nowhere/x.csv"], "cannot be written"),
        (["FILE", "--peers", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["FILE", "--sedes", "1"], "unrecognized arguments"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    file = write(tmp_path, entry())
    assert main(["deployments", *[str(file) if f == "FILE" else f for f in flags]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_plain_and_fast_engines_predict_the_same(tmp_path: Path) -> None:
    cold = entry(id="is-moe", model={"hf": "mistralai/Mixtral-8x7B-v0.1", "moe": None}, tp=2)
    offloading = entry(id="is-offload")
    offloading["engine"] = {**offloading["engine"], "cpu_kv_offload": True, "cpu_kv_blocks": 50}
    for experiment in load_experiments(write(tmp_path, cold, offloading)):
        fast = predict(experiment, seeds=[0])
        plain = predict(experiment, seeds=[0], fast=False)
        assert fast.values == plain.values
        assert fast.values[-1, "ttft_p99"] > fast.values[-1, "ttft_p50"]
