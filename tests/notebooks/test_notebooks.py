"""Every notebook runs headless from top to bottom, on the bundled sample and on a real trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import traces
from sim import Scenario, simulate
from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run(path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The outputs of a fresh run; an error in a cell raises."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def pictures(outputs: list[dict[str, Any]]) -> int:
    return sum("image/png" in o.get("data", {}) for o in outputs)


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    """What is printed, and tables as text; not the names of figures."""
    shown = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
    return [text for text in shown if not text.startswith("<Figure")]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[p.stem for p in NOTEBOOKS])
def test_stored_sentences_and_tables_are_those_of_a_fresh_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOKENTWIN_TRACE", "TOKENTWIN_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    stored = nbformat.read(path, as_version=4).cells
    outputs = [o for cell in stored if cell.cell_type == "code" for o in cell.outputs]
    fresh = run(path, {}, monkeypatch)
    assert texts(fresh) == texts(outputs)
    assert pictures(fresh) == pictures(outputs) >= 3


def test_what_if_says_of_the_policies_what_is_so() -> None:
    """Its text after the policies' table: which serves more where, and whose ITL tail is short."""
    base = Scenario.of(trace=str(traces.sample_path()))
    found = {
        (gpu, policy): simulate(base.with_({"gpu": gpu, "policy": policy})).summary
        for gpu in ("a100-80g", "h100")
        for policy in ("chunked", "continuous")
    }
    capacity = {k: s["stability"]["capacity_requests_per_s"] for k, s in found.items()}
    assert capacity["a100-80g", "continuous"] > 1.1 * capacity["a100-80g", "chunked"]
    assert capacity["h100", "continuous"] == pytest.approx(capacity["h100", "chunked"], rel=0.03)
    for gpu in ("a100-80g", "h100"):
        assert found[gpu, "chunked"]["itl_s"]["p99"] < found[gpu, "continuous"]["itl_s"]["p99"]


@pytest.mark.slow
@pytest.mark.shared
def test_what_if_runs_on_a_real_trace(shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shared_dir / "traces" / "AzureLLMInferenceTrace_conv.csv"
    env = {"TOKENTWIN_TRACE": str(real), "TOKENTWIN_LIMIT": "1000"}
    outputs = run(ROOT / "notebooks" / "what_if.ipynb", env, monkeypatch)
    assert pictures(outputs) == 5
    assert any(real.name in o.get("text", "") for o in outputs)


def test_stored_notebooks_were_run_and_name_no_folder_of_a_machine() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert pictures([o for c in nbformat.reads(text, 4).cells for o in c.get("outputs", [])]), (
            f"{path.name} is stored without its pictures"
        )
        assert str(ROOT) not in text
