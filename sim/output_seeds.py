"""What several seeds say together, to a person."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from sim.output_table import ROWS, Row, Style, columns, title, trace_line
from sim.scenario import Scenario


def render_seeds(
    documents: Mapping[str, Mapping[str, Any]], scenario: Scenario, style: Style
) -> str:
    """One scenario (under no name) with mean, lowest and highest, or a column of means for each of
    several policies."""
    first = next(iter(documents.values()))
    one, several = first["runs"][0], "" not in documents
    extremes = not several and first["seeds"]["runs"] > 1
    rows: list[Row] = []
    for name, path, show in ROWS:
        found = [document["metrics"][path] for document in documents.values()]
        cells = [_mean(estimate, show) for estimate in found]
        if extremes:
            cells += [show(found[0]["min"]), show(found[0]["max"])]
        rows.append((name, cells))
    if several:
        verdicts = [_verdicts(d["verdicts"]) for d in documents.values()]
        rows.insert(0, ("stability", verdicts))
        heads = list(documents)
    else:
        heads = ["mean", "lowest", "highest"] if extremes else ["one run"]
    lines = [style.paint(title(one, scenario, policy=not several), "1")]
    lines.append(style.label("trace") + trace_line(one, simulated=False))
    lines += _seeds(documents, style)
    if not several:
        lines.append(style.label("stability") + _verdicts(first["verdicts"]))
    return "\n".join([*lines, "", *columns(heads, rows, style)])


def _seeds(documents: Mapping[str, Mapping[str, Any]], style: Style) -> list[str]:
    values = next(iter(documents.values()))["seeds"]["values"]
    said = dict.fromkeys(document["seeds"]["sentence"] for document in documents.values())
    text = f"{values[0]} to {values[-1]}: {'; '.join(said)}"
    if any(document["seeds"]["runs"] > 1 for document in documents.values()):
        text += ". Means over runs, ± the 95 % confidence interval (Student's t)"
    head, *rest = textwrap.wrap(text, 100)
    return [style.label("seeds") + head, *(style.label("") + line for line in rest)]


def _verdicts(verdicts: Mapping[str, int]) -> str:
    if len(verdicts) == 1:
        return next(iter(verdicts))
    return ", ".join(f"{verdict} {number}" for verdict, number in verdicts.items())


def _mean(estimate: Mapping[str, Any], show: Callable[[float | None], str]) -> str:
    half = estimate["ci95_half_width"]
    shown = show(estimate["mean"])
    return shown if half is None else f"{shown} ± {show(half)}"
