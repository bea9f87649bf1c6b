"""`kernels` is a namespace package: it imports from the checkout, a wheel and an editable install,
and leaves Hugging Face's distribution of the same name alone when both are installed.

Theirs has an `__init__.py` and wins the name. A wheel of ours lies in the same folder and is found
through it; an editable install lies elsewhere, and whoever imports it adds its folder to
`kernels.__path__` first.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = sorted(path.name for path in (ROOT / "kernels").glob("*.py"))
FIND = "import importlib.util as u; print(u.find_spec('kernels.paged_attention').origin)"
THEIRS = "import kernels; print(kernels.get_kernel())"


def python(interpreter, code, cwd):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [str(interpreter), "-c", code], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.strip()


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_there_is_no_init_file():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kernels_import_from_the_checkout():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    code = "import kernels.paged_attention as m; print(m.__file__)"
    assert python(sys.executable, code, ROOT) == str(ROOT / "kernels" / "paged_attention.py")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the project to build from, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    for name in ("kernels", "sim", "policies", "traces", "calibrate"):
        ignore = shutil.ignore_patterns("__pycache__", "*.gz", "*.csv")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """A wheel of the project."""
    out = tmp_path_factory.mktemp("wheel")
    run = pip("wheel", "--no-deps", "--wheel-dir", out, source)
    if run.returncode:
        pytest.skip(f"pip could not build a wheel here (no index?): {run.stderr[-300:]}")
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A wheel named like theirs: a package `kernels` with an `__init__.py` and one function."""
    path = tmp_path_factory.mktemp("theirs") / "kernels-0.1-py3-none-any.whl"
    files = {
        "kernels/__init__.py": "def get_kernel():\n    return 'theirs'\n",
        "kernels-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.1\n",
        "kernels-0.1.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{name},,\n" for name in [*files, "kernels-0.1.dist-info/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files | {"kernels-0.1.dist-info/RECORD": record}).items():
            archive.writestr(name, text)
    return path


def environment(folder, *wheels):
    """A bare virtual environment with these wheels; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    interpreter = folder / "bin" / "python"
    for path in wheels:
        run = pip("--python", interpreter, "install", "--no-deps", "--no-index", path)
        assert run.returncode == 0, run.stderr[-2000:]
    return interpreter


@pytest.mark.slow
def test_wheel_contains_every_kernel_and_no_init_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = sorted(n.split("/")[1] for n in archive.namelist() if n.startswith("kernels/"))
    assert packed == OURS


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours-first", "theirs-first"])
def test_wheel_lives_beside_theirs(order, wheel, theirs, tmp_path):
    wheels = (wheel, theirs) if order == "ours-first" else (theirs, wheel)
    interpreter = environment(tmp_path / "env", *wheels)
    assert python(interpreter, FIND, tmp_path).endswith("kernels/paged_attention.py")
    assert python(interpreter, THEIRS, tmp_path) == "theirs"
    assert pip("--python", interpreter, "uninstall", "--yes", "tokentwin").returncode == 0
    assert python(interpreter, THEIRS, tmp_path) == "theirs"


@pytest.mark.slow
def test_editable_install_lives_beside_theirs(source, theirs, tmp_path):
    interpreter = environment(tmp_path / "env")
    run = pip("--python", interpreter, "install", "--no-deps", "--editable", source)
    if run.returncode:
        pytest.skip(f"pip could not install editable here (no index?): {run.stderr[-300:]}")
    ours = str(source / "kernels" / "paged_attention.py")
    assert python(interpreter, FIND, tmp_path) == ours

    both = pip("--python", interpreter, "install", "--no-deps", "--no-index", theirs)
    assert both.returncode == 0, both.stderr[-2000:]
    assert python(interpreter, THEIRS, tmp_path) == "theirs"
    add = f"import kernels; kernels.__path__.append({str(source / 'kernels')!r})"
    assert python(interpreter, f"{add}; {FIND}", tmp_path) == ours
    assert python(interpreter, f"{add}; {THEIRS}", tmp_path) == "theirs"
