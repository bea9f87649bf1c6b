"""Every command that the README and the docs show is run here, in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, SHARED

PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)
BLOCK = re.compile(r"^```(sh|bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# file: (\S+)\n")
# These build a virtual environment: the first has its own test below, the second runs this one.
BY_MAKE = {"make demo", "make test"}


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(line, language, text) of each fenced block of shell commands or Python."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in BLOCK.finditer(text):
        lines = [c for c in block.group(2).splitlines() if c.split("#")[0].strip() not in BY_MAKE]
        if any(c.strip() and not c.lstrip().startswith("#") for c in lines):
            line = text.count("\n", 0, block.start()) + 1
            found.append((line, block.group(1), "\n".join(lines) + "\n"))
    return found


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder like the checkout's root, in which commands may write."""
    for entry in ROOT.iterdir():
        if entry.is_dir() and not entry.name.startswith((".", "out", "build", "dist")):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=[p.relative_to(ROOT).as_posix() for p in PAGES])
def test_documented_commands_run(page: Path, workspace: Path) -> None:
    """A page's blocks run in order in one folder; `# file: NAME` heads a block to be saved."""
    env = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for line, language, text in blocks(page):
        if named := FILE.match(text):
            (workspace / named.group(1)).write_text(text, encoding="utf-8")
            continue
        if "../shared" in text and not SHARED.is_dir():
            pytest.skip("needs the shared data folder beside the checkout")
        text = text.replace("../shared", str(SHARED))
        if language == "python":
            command = [sys.executable, "-c", text]
        else:
            command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            command, cwd=workspace, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, (
            f"{page.name}:{line}\n{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )


def test_readme_names_the_two_commands_and_ci_calls_the_second() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make test" in readme
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.slow
def test_make_demo_on_a_fresh_clone(tmp_path: Path) -> None:
    """What a newcomer does first: no environment, nothing built, one command."""
    clone = tmp_path / "clone"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, clone / name)
    base = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={base}"],
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "TTFT" in done.stdout
