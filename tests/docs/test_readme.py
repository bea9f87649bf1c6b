"""What the README shows is what comes out, and what it says of files is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import traces
from sim.cli import main
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_output_shown_is_that_of_the_command_above_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no wall-clock time in it, so all of it is compared."""
    shown = re.search(r"```sh\nsimulate (.*)\n```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(ROOT)
    assert main(shown[1].split()) == 0
    assert capsys.readouterr().out == shown[2]
    assert f"simulate {shown[1]}" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_stored_scenario_names_the_trace_by_its_absolute_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "names the trace by its absolute" in README
    monkeypatch.chdir(ROOT)
    relative = traces.sample_path().relative_to(ROOT)
    assert main(["--trace", str(relative), "--limit", "5", "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    stored = yaml.safe_load((tmp_path / "scenario.yaml").read_text(encoding="utf-8"))
    assert stored["trace"]["path"] == str(ROOT / relative)
