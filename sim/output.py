"""What a run leaves for machines: one JSON document, and a folder of tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim import native
from sim.errors import UserError
from sim.rerun import runs_anywhere

if TYPE_CHECKING:
    from sim.result import Result


def to_json(document: Mapping[str, Any]) -> str:
    """The document as JSON; numbers that are not finite are null, as JSON has none."""
    return json.dumps(_plain(document), indent=2, allow_nan=False, ensure_ascii=False)


def with_wall_time(result: Result) -> dict[str, Any]:
    """The summary, the seconds spent in the event loop and whether it was compiled: what no file
    records."""
    summary = dict(result.summary)
    took = {"wall_s": result.wall_s, "cpu_s": result.cpu_s, "compiled": native.in_use()}
    summary["run"] = {**summary["run"], **took}
    return summary


def prepare_folder(path: str | Path) -> Path:
    """Make the folder, before a long run rather than after it. Raises UserError."""
    folder = Path(path)
    if not str(path).strip():
        raise UserError("--out needs the name of a folder, such as --out results")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {path}: cannot write there: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the name
        raise UserError(f"--out {str(path)!r}: cannot write there: {error}") from None
    return folder


def write_folder(result: Result, folder: Path) -> None:
    """requests.parquet, steps.parquet, summary.json, scenario.yaml. The same scenario gives the
    same bytes. Raises UserError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(pa.table(result.request_columns()), folder / "requests.parquet")
        # A replica at a time: the expanded tables of a long run would not fit together.
        writer: Any = None
        for replica in range(len(result.logs)):
            table = pa.table(result.step_columns(replica))
            if writer is None:
                writer = pq.ParquetWriter(folder / "steps.parquet", table.schema)
            writer.write_table(table)
        writer.close()
        summary = to_json(result.summary) + "\n"
        # File names need not be UTF-8; their other bytes become escapes that JSON knows.
        (folder / "summary.json").write_bytes(summary.encode("utf-8", "backslashreplace"))
        (folder / "scenario.yaml").write_text(
            runs_anywhere(result.scenario).to_yaml(), encoding="utf-8"
        )
    except OSError as error:
        raise UserError(f"{folder}: cannot write: {error.strerror or error}") from None


def write_seeds(document: Mapping[str, Any], folder: Path) -> None:
    """seeds.json: what several seeds say together; the folders beside it have each run."""
    together = {name: value for name, value in document.items() if name != "runs"}
    try:
        (folder / "seeds.json").write_text(to_json(together) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot write: {error.strerror or error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
