"""Every notebook runs headless from top to bottom, on the bundled sample and on a real trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

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


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[p.stem for p in NOTEBOOKS])
def test_notebook_runs_on_the_sample(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pictures(run(path, {"TOKENTWIN_LIMIT": "400"}, monkeypatch)) >= 3


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
