"""Compiling the event loop with mypyc, into the user's cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

from sim.native import GROUP, MODULES, PACKAGE, cache, key

KEPT = 4
"""Folders of other keys that stay: another Python's, another checkout's."""
SKIP = (
    "sim.run sim.result sim.scenario calibrate policies traces torch pandas scipy simpy rich "
    "matplotlib yaml pyarrow"
)
"""Modules whose types the compiled ones do not need; reading them would take a minute."""
SCRIPT = """
import sys
from pathlib import Path
from mypyc.build import mypycify
from setuptools import setup

group, *files = sys.argv[1:]
modules = mypycify(
    ["--config-file", "mypy.ini", "--cache-dir", "cache", *files],
    opt_level="2", debug_level="0", target_dir="c", group_name=group,
)
for module in modules:  # fused operations round differently from Python's and NumPy's
    module.extra_compile_args = [*module.extra_compile_args, "-ffp-contract=off"]
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", "out", "--build-temp", "o"]
setup(name=group, packages=[], ext_modules=modules)
"""


def main() -> int:
    """Compile unless it is done; say what is done, or why it cannot be."""
    folder = cache() / key()
    if folder.is_dir():
        print("the event loop is compiled already", file=sys.stderr)
        return 0
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        return _stay("mypy is not installed: pip install 'tokentwin[native]'")
    if not folder.is_absolute():
        return _stay("there is no home folder: set XDG_CACHE_HOME")
    print("compiling the event loop, once for this version (half a minute) ...", file=sys.stderr)
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as work:
            problem = build(Path(work))
            if problem is not None:
                return _stay(problem)
            _keep(Path(work) / "out", folder)
    except OSError as error:
        return _stay(str(error))
    print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


def build(work: Path) -> str | None:
    """Compile `MODULES` into `work`/out; what went wrong, in a line."""
    shutil.copytree(PACKAGE, work / "sim", ignore=shutil.ignore_patterns("__pycache__", "*.gz"))
    skip = ",".join(f"{name}.*" for name in SKIP.split())
    (work / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
        f"[mypy-{skip}]\nfollow_imports = skip\n"
    )
    files = [f"{name.replace('.', '/')}.py" for name in MODULES]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, GROUP.removesuffix("__mypyc"), *files],
        cwd=work, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return None
    said = f"{done.stdout}\n{done.stderr}".strip().splitlines()
    errors = [line for line in said if "error:" in line.lower()]
    return textwrap.shorten((errors or said or ["the compiler failed"])[-1], 200)


def _stay(why: str) -> int:
    print(f"the event loop stays in Python, at about half the speed: {why}", file=sys.stderr)
    return 1


def _keep(built: Path, folder: Path) -> None:
    """Move what was built into its folder of the cache, at once or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=folder.parent, prefix="tmp"))
    try:
        shutil.copytree(built, staged, dirs_exist_ok=True)
        staged.rename(folder)
    except OSError:
        if not folder.is_dir():  # else somebody was faster
            raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    others = [f for f in folder.parent.iterdir() if f != folder and f.is_dir()]
    others.sort(key=lambda f: f.stat().st_mtime, reverse=True)
    for old in others[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
