"""The compiled event loop: found only for its very sources, and equal to the Python one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sim import native
from sim.native import compile as compiling

SCENARIOS = {
    "azure": ("--trace", "traces/data/synthetic_azure_conv.csv"),
    "prefixes": (
        *("--generate", "gamma:rate=8,cv=2,n=400,prompt=lognormal(500,1500),output=uniform(1,200)"
          ",system=4x512"),
        *("--replicas", "2", "--routing", "least-requests"),
    ),
    "short of memory": (
        *("--trace", "traces/data/synthetic_azure_conv.csv", "--limit", "500"),
        *("--set", "engine.num_gpu_blocks=1200", "--policy", "priority"),
    ),
    "at the door": (
        *("--trace", "traces/data/synthetic_azure_conv.csv", "--limit", "500", "--rate-scale", "4"),
        *("--set", "admission=queue-limit", "--set", "client.timeout_s=20"),
    ),
}  # fmt: skip


def run(root: Path, switch: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sim.cli", *args, "--json", "--quiet"],
        cwd=root, env={**os.environ, native.SWITCH: switch},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    assert compiling.main() == 0


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", SCENARIOS)
def test_results_are_those_of_the_python_modules(name, repo_root):
    found = []
    for switch in "01":
        done = run(repo_root, switch, *SCENARIOS[name])
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["run"].pop("compiled") is (switch == "1")
        assert document["run"].pop("cpu_s") > 0
        assert document["run"].pop("wall_s") > 0
        found.append(document)
    assert found[0] == found[1]
    assert found[0]["run"]["engine"] == "fast"


def test_any_change_of_a_source_leaves_the_compiled_modules_behind(tmp_path, monkeypatch):
    copy = tmp_path / "sim"
    shutil.copytree(native.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.gz"))
    here = native.key()
    monkeypatch.setattr(native, "PACKAGE", copy)
    assert native.key() == here
    for file in ("engine/fast/engine.py", "cost/interface.py", "request.py", "native/compile.py"):
        with (copy / file).open("a") as source:
            source.write("# changed\n")
        changed = native.key()
        assert changed != here, file
        here = changed


def test_every_module_named_is_there():
    for name in native.MODULES:
        path = native.PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
        assert path.is_file()
        top = path.relative_to(native.PACKAGE).parts[0]
        assert top in native.SOURCES


def test_insisting_on_modules_that_are_not_there(tmp_path, repo_root, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run(repo_root, "1", "--help")
    assert done.returncode == 1
    assert "TOKENTWIN_NATIVE=1, but" in done.stderr
    assert "run python -m sim.native" in done.stderr
    document = json.loads(run(repo_root, "", *SCENARIOS["azure"], "--limit", "5").stdout)
    assert document["run"]["compiled"] is False


def test_a_user_without_a_home_has_nothing_compiled(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it does then
    assert not native.cache().exists()


@pytest.mark.parametrize("lacking", ["mypy", "a compiler that works", "room"])
def test_what_cannot_be_compiled_stays_in_python(lacking, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if lacking == "mypy":
        monkeypatch.setattr(compiling, "find_spec", lambda name: None)
        why = "mypy is not installed"
    elif lacking == "room":
        monkeypatch.setattr(compiling, "build", lambda work: None)
        why = "No such file"  # nothing was built: as if the disk had lost it
    else:
        monkeypatch.setattr(compiling, "MODULES", ("sim.engine.fast.blocks",))
        monkeypatch.setenv("CC", "false")
        why = "error: Command"
    assert compiling.main() == 1
    said = capfd.readouterr().err
    assert "the event loop stays in Python" in said
    assert why in said
    assert not native.cache().exists() or not any(native.cache().iterdir())
