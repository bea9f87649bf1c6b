"""Time budgets as users write them, and the bar that shows how far things are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from sim.errors import UserError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def seconds(text: str) -> float:
    """`90s`, `5m`, `1h` or plain seconds. UserError for anything else, and for nothing."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if found is None or float(found[1]) == 0:
        raise UserError(f"a budget is a time such as 90s or 5m, not {text!r}")
    return float(found[1]) * _UNITS[found[2]]


Show = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""


@contextmanager
def progress_bar(show: bool = True) -> Iterator[Show]:
    """A bar on stderr that goes away at the end; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    if not show or not console.is_terminal:
        yield lambda what, fraction: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda what, fraction: bars.update(task, description=what, completed=fraction)
