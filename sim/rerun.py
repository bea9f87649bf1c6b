"""Files that a scenario names: absolute where it must run again, short where it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.tree import DEFAULT_POLICIES

if TYPE_CHECKING:
    from sim.scenario import Scenario


def runs_anywhere(scenario: Scenario) -> Scenario:
    """The scenario with absolute paths, so that it works from any folder."""
    changes: dict[str, Any] = {}
    if scenario.trace is not None:
        changes["trace.path"] = str(Path(scenario.trace.path).resolve())
    if scenario.generate is not None:
        changes["generate"] = _with_absolute_files(scenario.generate)
    if scenario.cost.profile is not None and Path(scenario.cost.profile).is_file():
        changes["cost.profile"] = str(Path(scenario.cost.profile).resolve())
    if Path(scenario.model).exists():
        changes["model"] = str(Path(scenario.model).resolve())
    for name in DEFAULT_POLICIES:
        place, colon, cls = getattr(scenario, name).name.rpartition(":")
        file = Path(place if place.endswith(".py") else f"{place}.py")
        if colon and file.is_file():
            changes[f"{name}.name"] = f"{file.resolve()}:{cls}"
    return scenario.with_(changes)


def shown_policy(name: str) -> str:
    """`path/to/own.py:Own` -> `own:Own`: the same from wherever it is run."""
    place, colon, cls = name.rpartition(":")
    return f"{Path(place).name.removesuffix('.py')}:{cls}" if colon else name


def shown_workload(text: str) -> str:
    """A workload's text with `empirical(FILE)` without folders."""
    return _files_in(text, lambda name: Path(name).name)


def _with_absolute_files(workload: Any) -> Any:
    """A workload whose `empirical(FILE)` names absolute paths."""
    if isinstance(workload, Mapping):
        return {
            k: str(Path(v).resolve())
            if k in ("empirical", "file") and isinstance(v, str)
            else _with_absolute_files(v)
            for k, v in workload.items()
        }
    if not isinstance(workload, str):
        return workload
    return _files_in(workload, lambda name: str(Path(name).resolve()))


def _files_in(text: str, renamed: Callable[[str], str]) -> str:
    """A workload's text with the name of every `empirical(FILE)` changed, in quotes."""

    def change(found: re.Match[str]) -> str:
        name = renamed(next(n for n in found.groups()[1:] if n is not None).strip())
        quote = '"' if "'" in name else "'"
        return f"{found[1]}{quote}{name}{quote}"

    name = r"""(?:'([^']*)'|"([^"]*)"|([^'",()]+))"""
    return re.sub(rf"(empirical\(\s*(?:file\s*=\s*)?){name}", change, text)
