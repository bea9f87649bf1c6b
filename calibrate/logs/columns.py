"""Records from named columns: one row per step, or one row per request.

Steps are told by a `duration` (or `start` and `end`), requests by `prompt` and `output`. Times are
seconds, or in the unit that the role ends in: `ttft_ms=latency_first`. Absolute times (`arrival`,
`first_token`, `last_token`, `start`, `end`) count from anywhere; those of requests may be dates.
"""

from __future__ import annotations

import decimal
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calibrate.logs.records import FloatArray, IntArray, Records, Requests, Steps
from calibrate.logs.table import Row, Table, base_of, open_table, parse_roles, unit_of
from sim.cost.interface import StepShapes
from sim.errors import UserError
from traces.source import BadRows
from traces.values import MAX_TOKENS, BadRow, arrival, looks_like_date, number, shown, whole

REQUEST_TIMES = ("arrival", "ttft", "tpot", "e2e", "first_token", "last_token")
REQUEST_ROLES = (*REQUEST_TIMES, "prompt", "output", "prompt_id", "ok")
STEP_TIMES = ("duration", "start", "end")
STEP_COUNTS = (
    "decodes",
    "decode_tokens",
    "context",
    "context_sq",
    "prefill_tokens",
    "prefills",
    "prefix",
    "sampled",
)
STEP_ROLES = (*STEP_TIMES, *STEP_COUNTS, "chunks")
TIMES = (*REQUEST_TIMES, *STEP_TIMES)
GOOD = ("1", "1.0", "true", "yes", "ok", "success", "successful", "succeeded", "completed", "200")
BAD = ("0", "0.0", "false", "no", "failed", "failure", "error", "errored", "aborted", "rejected",
       "unfinished", "cancelled", "incomplete", "timeout")  # fmt: skip
LONGEST_S = 1e9
ROUNDING_S = 1e-5
"""Of the times of one request, by which the last token may seem to be before the first."""
MOST = 2**53


def read_columns(
    path: str, columns: str, output_tokens: int | None = None, skip_bad_rows: bool = False
) -> Records:
    """The steps or requests of a table. `output_tokens` is what every request generated, whatever
    a column says. UserError names file, row and what to do."""
    roles = parse_roles(columns, (*REQUEST_ROLES, *STEP_ROLES), TIMES)
    given = {base_of(role, TIMES) for role in roles}
    if given <= set(STEP_ROLES) and given & set(STEP_TIMES):
        if output_tokens is not None:
            raise UserError("--output-tokens is about requests; these columns are of steps")
        return _steps(open_table(path), roles, skip_bad_rows)
    if given <= set(REQUEST_ROLES):
        return _requests(open_table(path), roles, output_tokens, skip_bad_rows)
    strangers = sorted(given - set(REQUEST_ROLES))
    raise UserError(
        f"columns: {', '.join(strangers)} belongs to steps, which need duration=COLUMN (or start "
        f"and end); requests have {', '.join(REQUEST_ROLES)}"
    )


# Requests.


@dataclass
class _RequestRow:
    sent_ns: int
    prompt: int
    output: int
    ttft: float
    tpot: float
    e2e: float
    content: str


def _requests(table: Table, roles: Mapping[str, str], fixed: int | None, skip: bool) -> Requests:
    given = {base_of(role, TIMES) for role in roles}
    for role in ("arrival", "prompt", "output"):
        if role not in given and not (role == "output" and fixed is not None):
            raise UserError(
                f"columns: {role}=COLUMN is missing (requests need arrival, prompt, output)"
            )
    if not given & {"ttft", "tpot", "e2e", "first_token", "last_token"}:
        raise UserError(
            "columns: no latency named: give ttft=COLUMN, tpot=COLUMN, e2e=COLUMN, "
            "first_token=COLUMN or last_token=COLUMN"
        )
    for one, other in (("ttft", "first_token"), ("e2e", "last_token")):
        if {one, other} <= given:
            raise UserError(f"columns: {one} and {other} say the same; name one of them")
    bad = BadRows(table.shown, skip)
    clock = _Clock(roles)
    rows: list[_RequestRow] = []
    failed = read = 0
    for row in table.rows(roles, bad):
        read += 1
        try:
            if "ok" in row.cells and not _succeeded(row.cells["ok"]):
                failed += 1
                continue
            rows.append(_request(row, roles, clock, fixed))
        except BadRow as error:
            bad.report(row.place, error.kind, error.reason)
    if not rows:
        raise UserError(
            f"{table.shown}: no usable request ({read} rows, {failed} failed) {bad.first}"
        )
    notes = [] if "prompt_id" in given else ["prompts taken as all different (no prompt_id)"]
    if fixed is not None:
        notes.append(set_output(fixed))
    if failed:
        notes.append(f"{failed} failed requests left out of the load too")
    return requests_of(
        table.source.path.name,
        f"requests in named columns ({table.kind})",
        np.array([r.sent_ns for r in rows], dtype=np.int64),
        np.array([r.prompt for r in rows], dtype=np.int64),
        np.array([r.output for r in rows], dtype=np.int64),
        ttft_s=np.array([r.ttft for r in rows]),
        tpot_s=np.array([r.tpot for r in rows]),
        e2e_s=np.array([r.e2e for r in rows]),
        content=[r.content for r in rows] if "prompt_id" in given else None,
        counts={"rows": read, "failed": failed, "skipped": bad.total},
        notes=notes,
    )


def requests_of(
    name: str,
    format: str,
    sent_ns: IntArray,
    prompt: IntArray,
    output: IntArray,
    *,
    ttft_s: FloatArray,
    e2e_s: FloatArray,
    tpot_s: FloatArray | None = None,
    content: Sequence[str] | None = None,
    max_in_flight: int | None = None,
    counts: Mapping[str, int] | None = None,
    notes: Sequence[str] = (),
) -> Requests:
    """Requests in order of sending, times from the first, with the latency that the two others
    determine. `sent_ns` are on any clock; equal texts of `content` are equal prompts, the empty
    one is private."""
    order = np.argsort(sent_ns, kind="stable")
    numbers = None
    if content is not None:
        known: dict[str, int] = {}
        ids = [known.setdefault(text or f"\0{i}", len(known)) for i, text in enumerate(content)]
        numbers = np.array(ids, dtype=np.int64)[order]
    more = np.where(output > 1, output - 1, np.nan)
    tpot = np.full(len(output), np.nan) if tpot_s is None else tpot_s
    tpot = np.where(np.isnan(tpot), (e2e_s - ttft_s) / more, tpot)
    tpot = np.where(output > 1, tpot, np.nan)
    e2e = np.where(np.isnan(e2e_s), ttft_s + tpot * more, e2e_s)
    return Requests(
        name,
        format,
        (sent_ns - sent_ns.min())[order] / 1e9,
        prompt[order],
        output[order],
        ttft_s[order],
        tpot[order],
        e2e[order],
        numbers,
        max_in_flight,
        dict(counts or {}),
        tuple(notes),
    )


def set_output(tokens: int) -> str:
    return f"output of every request set to {tokens} tokens"


@dataclass
class _Clock:
    """Absolute times of a file as nanoseconds; whether they are dates is told by the first."""

    roles: Mapping[str, str]
    date: bool | None = None

    def ns(self, role: str, cell: object) -> int:
        name = base_of(role, TIMES)
        unit = unit_of(role, TIMES)
        if self.date is None:
            self.date = looks_like_date(cell)
        return arrival(cell, what(role, self.roles), "date" if self.date and name == role else unit)


def _request(row: Row, roles: Mapping[str, str], clock: _Clock, fixed: int | None) -> _RequestRow:
    cells = row.cells
    found: dict[str, float] = {}
    absolute: dict[str, int] = {}
    for role in roles:
        name = base_of(role, TIMES)
        if name == "arrival" or (name in ("first_token", "last_token") and filled(cells[role])):
            absolute[name] = clock.ns(role, cells[role])
        elif name in ("ttft", "tpot", "e2e") and filled(cells[role]):
            found[name] = seconds(cells[role], role, roles)
    for name, late in (("ttft", "first_token"), ("e2e", "last_token")):
        if late in absolute:
            if absolute[late] < absolute["arrival"]:
                raise BadRow(
                    "negative", f"{late} is before arrival; are they of one clock and unit?"
                )
            found[name] = (absolute[late] - absolute["arrival"]) / 1e9
    if found.get("e2e", math.inf) < found.get("ttft", 0.0) - ROUNDING_S:
        raise BadRow("range", "the last token is before the first")
    return _RequestRow(
        absolute["arrival"],
        whole(cells["prompt"], what("prompt", roles), 1, MAX_TOKENS),
        fixed or whole(cells["output"], what("output", roles), 1, MAX_TOKENS),
        found.get("ttft", math.nan),
        found.get("tpot", math.nan),
        found.get("e2e", math.nan),
        str(cells["prompt_id"]) if filled(cells.get("prompt_id")) else "",
    )


def _succeeded(cell: object) -> bool:
    text = str(cell).strip().lower()
    if text not in GOOD and text not in BAD:
        raise BadRow(
            "malformed", f"ok is {shown(cell)}, neither of {', '.join(GOOD[:5])} nor failed"
        )
    return text in GOOD


# Steps.


@dataclass
class _StepColumns:
    duration: list[float] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=lambda: {n: [] for n in STEP_COUNTS})
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, tokens, prefix)."""


def _steps(table: Table, roles: Mapping[str, str], skip: bool) -> Steps:
    given = {base_of(role, TIMES) for role in roles}
    if "duration" in given and given & {"start", "end"}:
        raise UserError("columns: name duration, or start and end, not both")
    if "duration" not in given and not {"start", "end"} <= given:
        raise UserError("columns: start and end are both needed without a duration")
    if "decodes" not in given and not given & {"prefill_tokens", "chunks"}:
        raise UserError("columns: steps need decodes=COLUMN or prefill_tokens=COLUMN, or both")
    if "decodes" in given and "context" not in given:
        raise UserError(
            "columns: context=COLUMN is missing: the summed KV length of a step's decodes decides "
            "what their attention costs"
        )
    bad = BadRows(table.shown, skip)
    columns = _StepColumns()
    read = empty = 0
    for row in table.rows(roles, bad):
        read += 1
        try:
            empty += not _step(row, roles, columns)
        except BadRow as error:
            bad.report(row.place, error.kind, error.reason)
    if not columns.duration:
        raise UserError(f"{table.shown}: no usable step ({read} rows, {empty} empty) {bad.first}")
    counts = {name: np.array(v, dtype=np.int64) for name, v in columns.counts.items()}
    flat = np.array(columns.chunks, dtype=np.int64).reshape(-1, 3)
    prefill = np.bincount(flat[:, 0], weights=flat[:, 1], minlength=len(columns.duration))
    shapes = StepShapes(
        num_decodes=counts["decodes"],
        decode_tokens=counts["decode_tokens"],
        decode_context=counts["context"],
        decode_context_sq=counts["context_sq"],
        num_sampled=counts["sampled"],
        num_tokens=counts["decode_tokens"] + prefill.astype(np.int64),
        chunk_step=flat[:, 0],
        chunk_tokens=flat[:, 1],
        chunk_prefix=flat[:, 2],
    )
    return Steps(
        table.source.path.name,
        f"steps in named columns ({table.kind})",
        shapes,
        np.array(columns.duration),
        {"rows": read, "empty": empty, "skipped": bad.total},
        tuple(_assumed(given, bool(len(flat)))),
    )


def _step(row: Row, roles: Mapping[str, str], columns: _StepColumns) -> bool:
    """Append one step; False when nothing was scheduled in it. Raises BadRow."""
    cells = row.cells
    named = {base_of(role, TIMES): role for role in roles}
    if "duration" in named:
        duration = seconds(cells[named["duration"]], named["duration"], roles)
    else:
        start, end = (seconds_exact(cells[named[n]], named[n], roles) for n in ("start", "end"))
        duration = float(end - start)
    counts = {
        name: whole(cells[name], what(name, roles), 0, MOST)
        for name in STEP_COUNTS
        if name in roles
    }
    decodes = counts.setdefault("decodes", 0)
    counts.setdefault("decode_tokens", decodes)
    context = counts.setdefault("context", 0)
    if decodes and context < decodes:
        raise BadRow("range", f"context is {context} tokens for {decodes} decodes, at least 1 each")
    if counts["decode_tokens"] < decodes or (counts["decode_tokens"] and not decodes):
        raise BadRow("range", f"{counts['decode_tokens']} decode tokens for {decodes} decodes")
    # Of equal lengths: the least that the squares can sum to.
    least = -(-context * context // decodes) if decodes else 0
    if not least <= counts.setdefault("context_sq", least) <= max(context * context, least):
        raise BadRow(
            "range", f"context_sq is {counts['context_sq']}, which no {decodes} lengths give"
        )
    chunks = _chunks(cells, roles, counts)
    counts.setdefault("sampled", decodes + len(chunks))
    if not decodes and not chunks:
        return False
    if not 0 < duration < LONGEST_S:
        raise BadRow("range", f"the step lasts {duration:g} s")
    at = len(columns.duration)
    columns.duration.append(duration)
    columns.chunks += [(at, tokens, prefix) for tokens, prefix in chunks]
    for name in STEP_COUNTS:
        columns.counts[name].append(counts.get(name, 0))
    return True


def _chunks(
    cells: Mapping[str, object], roles: Mapping[str, str], counts: Mapping[str, int]
) -> list[tuple[int, int]]:
    """(tokens, prefix) of a step's prefill chunks: as listed, else equal shares of the totals."""
    if "chunks" in roles:
        listed = cells["chunks"]
        if isinstance(listed, str):
            try:
                listed = json.loads(listed)
            except ValueError:
                raise BadRow("malformed", f"chunks is {shown(listed)}, not a JSON list") from None
        pairs = [] if listed is None else listed
        if not isinstance(pairs, list) or not all(
            isinstance(p, list | tuple) and len(p) == 2 for p in pairs
        ):
            raise BadRow("malformed", f"chunks is {shown(listed)}, not a list of [tokens, prefix]")
        return [
            (whole(q, "chunks", 1, MAX_TOKENS), whole(p, "chunks", 0, MAX_TOKENS)) for q, p in pairs
        ]
    tokens = counts.get("prefill_tokens", 0)
    number_of = counts.get("prefills", 1 if tokens else 0)
    if (tokens > 0) != (number_of > 0) or tokens < number_of:
        raise BadRow("range", f"{tokens} prefill tokens in {number_of} chunks")
    prefix = counts.get("prefix", 0)
    return [
        (tokens // number_of + (i < tokens % number_of), prefix // number_of)
        for i in range(number_of)
    ]


def _assumed(given: set[str], prefills: bool) -> list[str]:
    notes = []
    if "decodes" in given and "context_sq" not in given:
        notes.append("decodes of a step taken as equally long (no context_sq)")
    if prefills and "chunks" not in given:
        if "prefills" not in given:
            notes.append("prefill tokens of a step taken as one chunk (no prefills)")
        else:
            notes.append("prefill chunks of a step taken as equal (no chunks)")
        if "prefix" not in given:
            notes.append("chunks taken without a cached prefix (no prefix)")
    if prefills and "sampled" not in given:
        notes.append("every chunk taken as the last of its prompt (no sampled)")
    return notes


# Cells.


def what(role: str, roles: Mapping[str, str]) -> str:
    """A cell for a message: `ttft (latency_first)`."""
    column = roles[role]
    return role if role == column else f"{role} ({column})"


def filled(cell: object) -> bool:
    """Whether something is recorded: not empty, null or NaN."""
    if isinstance(cell, float):
        return not math.isnan(cell)
    return cell is not None and str(cell).strip().lower() not in ("", "nan", "null", "none")


def seconds(cell: object, role: str, roles: Mapping[str, str]) -> float:
    """A duration, not negative. Raises BadRow."""
    found = float(seconds_exact(cell, role, roles))
    if not 0 <= found < LONGEST_S:
        raise BadRow("range", f"{what(role, roles)} is {shown(cell)}: no duration")
    return found


def seconds_exact(cell: object, role: str, roles: Mapping[str, str]) -> decimal.Decimal:
    digits: Callable[[str], int] = {"s": 0, "ms": -3, "us": -6, "ns": -9}.__getitem__
    found: Any = number(cell, what(role, roles)).scaleb(digits(unit_of(role, TIMES)))
    return decimal.Decimal(found)
