"""Every recorded schedule of vLLM is reproduced byte for byte."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.harness import Run

CASES = Path(__file__).parent / "cases"
NAMES = sorted(path.name.removesuffix(".case.json") for path in CASES.glob("*.case.json"))


def load(name):
    case = json.loads((CASES / f"{name}.case.json").read_text())
    return case, (CASES / f"{name}.expected.json").read_text()


def test_cases_are_present():
    assert len(NAMES) >= 35


@pytest.mark.parametrize("name", NAMES)
def test_schedule_equals_recording(name):
    case, expected = load(name)
    assert Run(case, check=True).run().document() == expected


@pytest.mark.shared
def test_shared_recordings_are_covered(shared_dir):
    shared = shared_dir / "vllm_conformance" / "cases"
    assert {path.name for path in shared.iterdir()} <= {path.name for path in CASES.iterdir()}


def test_command_prints_the_document():
    _, expected = load("01_plain_batching")
    path = CASES / "01_plain_batching.case.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance", str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == expected
