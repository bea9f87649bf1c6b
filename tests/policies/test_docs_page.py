"""The page "Write your own policy": its files are written down, its commands run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for lang, text in BLOCK.findall(page.read_text()) if lang == language]


@pytest.fixture(scope="module")
def folder(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own")
    for text in blocks(repo_root / "docs" / "policies.md", "python"):
        name = re.match(r"# file: (\S+)\n", text)
        assert name is not None, f"a python block without its file name: {text[:60]!r}"
        (made / name[1]).write_text(text)
    return made


def commands() -> list[str]:
    page = Path(__file__).resolve().parents[2] / "docs" / "policies.md"
    found = []
    for text in blocks(page, "bash"):
        found += re.split(r"\n(?=simulate)", text.replace("\\\n", " ").strip())
    return found


@pytest.mark.parametrize("command", commands(), ids=lambda c: c.split(".py:")[1].split()[0])
def test_commands_of_the_page_run(folder: Path, repo_root: Path, command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "simulate"
    done = subprocess.run(
        [sys.executable, "-m", "sim.cli", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(repo_root), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "stability" in done.stdout
