"""The event loop as machine code: the same modules, compiled by mypyc.

    python -m sim.native

compiles `MODULES` once (half a minute, with a C compiler and mypy) into the user's cache. From then
on they are imported from there, and the event loop takes about half the time; results are equal to
the bit. What is compiled belongs to the sources it was made from: after any change to one of them,
or with another Python, the Python modules run again until they are compiled anew.
`TOKENTWIN_NATIVE=0` leaves the compiled ones alone, `TOKENTWIN_NATIVE=1` insists on them.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent.parent
MODULES = (
    *(
        f"sim.engine.fast.{name}"
        for name in (
            "blocks", "cohort", "engine", "extents", "foresight", "lines", "prefill", "prefix",
            "rules", "scheduler", "sequence", "timeline", "waiting", "walk",
        )
    ),
    "sim.engine.log",
    "sim.cost.step",
    "sim.cluster.arrivals",
    "sim.cluster.clock",
    "sim.cluster.cluster",
    "sim.cluster.records",
    "sim.cluster.replica",
)  # fmt: skip
SOURCES = ("engine", "cost", "cluster", "native")
"""Folders whose Python files, beside those at the top, the compiled code may depend on."""
SWITCH = "TOKENTWIN_NATIVE"
GROUP = "tokentwin__mypyc"
"""The library that holds the code of all modules; they only point into it."""


def key() -> str:
    """Names what is compiled: its sources, and the Python it is for."""
    digest = hashlib.sha256(f"{sys.version} {EXTENSION_SUFFIXES[0]}".encode())
    files = [*PACKAGE.glob("*.py"), *(f for s in SOURCES for f in (PACKAGE / s).rglob("*.py"))]
    for file in sorted(files):
        digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0")
        digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


def cache() -> Path:
    """Where compiled modules are kept, a folder per key."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "tokentwin" / "native"


class Finder:
    """Finds compiled modules, before Python looks for their sources."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != GROUP and name not in MODULES:
            return None
        file = self._folder.joinpath(*name.split(".")).as_posix() + EXTENSION_SUFFIXES[0]
        return spec_from_file_location(name, file)


def install() -> None:
    """Import compiled modules from now on, if there are any for these very sources. Raises
    ImportError when they are insisted on and there are none."""
    switch = os.environ.get(SWITCH, "")
    if switch == "0":
        return
    folder = cache() / key()
    if folder.is_dir():
        sys.meta_path.insert(0, Finder(folder))
    elif switch == "1":
        raise ImportError(f"{SWITCH}=1, but {folder} is not there: run python -m sim.native")


def in_use() -> bool:
    """Whether the event loop is compiled."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)
