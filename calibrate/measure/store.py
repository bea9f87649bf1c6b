"""Measured points in a file that survives an interruption: one JSON object a line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calibrate.measure.points import Point
from calibrate.timing import Timing
from sim.errors import UserError


class PointStore:
    """Appends every point at once; a second run of the same command finds them again.

    The first line says on which device and with which versions; points of another device, or
    measured with other versions, are refused rather than mixed.
    """

    SAME = ("device", "torch", "triton")

    def __init__(self, path: Path, machine: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        head = {name: machine.get(name) for name in self.SAME}
        if path.is_file() and path.stat().st_size:
            self._read(head)
        else:
            self._append({"machine": head})

    def _read(self, head: Mapping[str, Any]) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        complete, tail = lines[:-1], lines[-1]
        for number, line in enumerate(complete, start=1):
            try:
                entry = json.loads(line)
                if number == 1:
                    self._check(entry["machine"], head)
                else:
                    self.rows[entry["key"]] = entry
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self.path}:{number}: not a measured point; remove the file to start afresh"
                ) from error
        if tail:  # the last line was being written when the run was interrupted
            self.path.write_text("\n".join(complete) + "\n", encoding="utf-8")

    def _check(self, was: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        for name in self.SAME:
            if was[name] != head[name]:
                raise UserError(
                    f"{self.path}: its points were measured with {name} {was[name]}, this is "
                    f"{head[name]}; remove the file to start afresh"
                )

    def __contains__(self, point: Point) -> bool:
        return point.key in self.rows

    def add(self, point: Point, timing: Timing, kernel: str) -> None:
        entry = {
            "key": point.key,
            "table": point.op,
            **point.row(),
            "us": timing.us,
            "mean_us": timing.mean_us,
            "spread": timing.spread,
            "samples": timing.samples,
            "noisy": timing.noisy,
            "kernel": kernel,
        }
        self.rows[point.key] = entry
        self._append(entry)

    def skip(self, point: Point, why: str) -> None:
        """A point that cannot be measured here; it is not tried again."""
        entry = {"key": point.key, "table": point.op, **point.row(), "us": None, "noisy": why}
        self.rows[point.key] = entry
        self._append(entry)

    def tables(self, gpu: str) -> dict[str, list[dict[str, Any]]]:
        """Rows with a time, by operator, in the columns of the public kernel timings."""
        found: dict[str, list[dict[str, Any]]] = {}
        for entry in self.rows.values():
            if entry["us"] is None:
                continue
            row = {k: v for k, v in entry.items() if k not in ("key", "table", "mean_us")}
            row |= {"gpu": gpu, "engine": "tokentwin", "source": "measured"}
            found.setdefault(entry["table"], []).append(row)
        return found

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def write_csv(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """A table of points, with a column for everything that any of them has."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)
