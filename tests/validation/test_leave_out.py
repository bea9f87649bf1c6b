"""Leaving one model out: the constants found are those the measurements were made with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibrate.validate_cli import main
from calibrate.validation.leave_out import (
    CONSTANTS,
    StagePoint,
    leave_one_model_out,
    refitted,
)
from tests.validation.test_errors import MEASURED
from tests.validation.test_experiments import entry, write


def invented(truth: list[float]) -> list[StagePoint]:
    """Stages of four models whose measurements follow the constants exactly."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(8):
        features = rng.uniform(0, 1, len(CONSTANTS))
        base = float(rng.uniform(5, 20))
        measured = base + float(features @ np.array(truth))
        name = f"is-{number}"
        found.append(StagePoint(name, f"model-{number % 4}", 100, measured, base, features))
    return found


def test_true_constants_are_found_without_the_model() -> None:
    truth = [0.2, 1.5, -0.1]
    stages = invented(truth)
    assert list(refitted(stages).values()) == pytest.approx(truth)
    runs = leave_one_model_out(stages)
    assert len(runs) == 8
    assert all(abs(run.refitted) < 1e-6 for run in runs)
    assert any(abs(run.built_in) > 1 for run in runs)


def test_the_command_needs_two_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, entry(measured=MEASURED))
    assert main(["deployments", str(file), "--leave-one-model-out"]) == 2
    assert "two models" in capsys.readouterr().err


def test_the_command_prints_both_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = entry(id="is-b", model={"hf": "codellama/CodeLlama-34b-hf"}, tp=2, measured=MEASURED)
    file = write(tmp_path, entry(measured=MEASURED), other)
    assert main(["deployments", str(file), "--leave-one-model-out"]) == 0
    text = capsys.readouterr().out
    assert "is-tiny" in text
    assert "without the model: median" in text
