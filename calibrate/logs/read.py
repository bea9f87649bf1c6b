"""A log of any kind that is read, as records of steps or of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calibrate.logs.columns import read_columns, set_output
from calibrate.logs.native import read_native
from calibrate.logs.records import Records
from sim.errors import UserError
from traces.values import MAX_TOKENS

MIN_RECORDS = 20


def read_logs(
    paths: Sequence[str],
    columns: str | None = None,
    *,
    output_tokens: int | None = None,
    skip_bad_rows: bool = False,
) -> list[Records]:
    """The runs in all files: all of steps, or all of requests. UserError in one line."""
    if output_tokens is not None and not 1 <= output_tokens <= MAX_TOKENS:
        raise UserError(f"--output-tokens must be 1 to {MAX_TOKENS}, not {output_tokens}")
    found: list[Records] = []
    for path in paths:
        found += _read(path, columns, output_tokens, skip_bad_rows)
    if len({type(run) for run in found}) > 1:
        raise UserError("some files have steps and some requests: fit them one after the other")
    number = sum(map(len, found))
    if number < MIN_RECORDS:
        raise UserError(f"{number} records are too few to fit anything: at least {MIN_RECORDS}")
    return found


def _read(
    path: str, columns: str | None, output_tokens: int | None, skip_bad_rows: bool
) -> list[Records]:
    if columns is not None:
        return [read_columns(path, columns, output_tokens, skip_bad_rows)]
    runs = read_native(path, output_tokens)
    if runs is None:
        raise UserError(
            f"{path}: not a result of vllm bench serve, GuideLLM or inference-perf; name the "
            f"columns of a table: --columns arrival=COL,prompt=COL,output=COL,ttft=COL,e2e=COL for "
            f"requests, --columns duration=COL,decodes=COL,context=COL,prefill_tokens=COL for steps"
        )
    if output_tokens is not None:
        runs = [replace(run, notes=(*run.notes, set_output(output_tokens))) for run in runs]
    return list(runs)
