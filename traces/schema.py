"""Which column of a file means what: the public formats, and `--columns` of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sim.errors import UserError, normalise, unknown

from . import values

ARRIVAL_UNITS = {
    "arrival": "auto",
    "arrival_s": "s",
    "arrival_ms": "ms",
    "arrival_us": "us",
    "arrival_ns": "ns",
}
LABELS = ("tenant", "session", "id")
ROLES = (*ARRIVAL_UNITS, "prompt", "output", "priority", *LABELS, "hash_ids")

Converter = Callable[[object], object]


@dataclass(frozen=True)
class Schema:
    """What the columns of a trace file mean.

    `columns` maps a role (arrival, prompt, output, priority, tenant, session, id, hash_ids) to a
    column name. `unit` of arrivals is s, ms, us, ns, date, or auto (seconds or dates, told by the
    first row). `block_tokens` is the prompt tokens per hash id.
    """

    name: str
    columns: Mapping[str, str]
    unit: str = "auto"
    block_tokens: int = 512

    @property
    def has_arrivals(self) -> bool:
        return "arrival" in self.columns

    def with_unit_of(self, samples: Sequence[object]) -> Schema:
        """`auto` settled by the first of `samples` (cells of the arrival column) that tells."""
        if self.unit != "auto":
            return self
        kinds = (values.looks_like_date(sample) for sample in samples)
        is_date = next((kind for kind in kinds if kind is not None), False)
        return replace(self, unit="date" if is_date else "s")

    def converters(self) -> dict[str, Converter]:
        """role -> function from a cell to its value; raises values.BadRow."""
        table: dict[str, Converter] = {}
        for role, column in self.columns.items():
            what = role if normalise(role) == normalise(column) else f"{role} ({printable(column)})"
            if role == "arrival":
                table[role] = partial(values.arrival, what=what, unit=self.unit)
            elif role in ("prompt", "output"):
                table[role] = partial(values.tokens, what=what)
            elif role == "priority":
                table[role] = partial(values.priority, what=what)
            elif role == "hash_ids":
                table[role] = partial(_hash_ids, what=what)
            else:
                table[role] = partial(values.label, what=what)
        return table

    def check_row(self, row: Mapping[str, object]) -> None:
        """What only several cells together can break; raises values.BadRow."""
        ids, prompt = row.get("hash_ids"), row["prompt"]
        if isinstance(ids, list) and isinstance(prompt, int):
            full, rest = divmod(prompt, self.block_tokens)
            if not full <= len(ids) <= full + (rest > 0):
                needed = full + (rest > 0)
                raise values.BadRow(
                    "malformed",
                    f"hash_ids has {len(ids)} blocks, but {prompt} prompt tokens are {needed} "
                    f"blocks of {self.block_tokens}",
                )


FORMATS = (
    Schema(
        "azure",
        {"arrival": "TIMESTAMP", "prompt": "ContextTokens", "output": "GeneratedTokens"},
        unit="date",
    ),
    Schema(
        "mooncake",
        {
            "arrival": "timestamp",
            "prompt": "input_length",
            "output": "output_length",
            "hash_ids": "hash_ids",
        },
        unit="ms",
    ),
    Schema("vidur", {"prompt": "num_prefill_tokens", "output": "num_decode_tokens"}),
)
NOT_THESE = {"mooncake": ("chat_id",)}
"""Columns that tell a look-alike (Qwen-Bailian: seconds and 16-token blocks)."""


def printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= 60 else values.shown(name)


def _hash_ids(value: object, what: str) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        shown = values.shown(value)
        raise values.BadRow("malformed", f"{what} is {shown}, not a list of whole numbers")
    if value and not (min(value) >= 0 and max(value) <= values.MAX_NS):
        raise values.BadRow("range", f"{what} has an id outside 0 to 2^63-1")
    return value


def role_pairs(text: str) -> Iterator[tuple[str, str]]:
    """(role, column) of each item of `arrival=ts,prompt=in_tok`; UserError for another form."""
    for item in filter(None, (part.strip() for part in text.split(","))):
        role, equals, column = (part.strip() for part in item.partition("="))
        if not equals or not column:
            raise UserError(f"columns: {item!r} is not of the form role=column")
        yield role, column


def parse_columns(columns: str | Mapping[str, str]) -> Schema:
    """The schema of `arrival=ts,prompt=in_tok,output=out_tok[,...]` or of such a mapping.

    Raises UserError for an unknown role, one named twice, or no prompt or output.
    """
    if isinstance(columns, str):
        pairs = list(role_pairs(columns))
    else:
        pairs = [(str(role), str(column)) for role, column in columns.items()]
    table: dict[str, str] = {}
    unit = "auto"
    for role, column in pairs:
        if role not in ROLES:
            raise unknown("column role", role, ROLES)
        if role in ARRIVAL_UNITS:
            unit, role = ARRIVAL_UNITS[role], "arrival"
        if role in table:
            raise UserError(f"columns: {role} is named twice")
        table[role] = column
    for role in ("prompt", "output"):
        if role not in table:
            raise UserError(f"columns: {role}=COLUMN is missing (prompt and output are needed)")
    return Schema("columns", table, unit)


def choose(
    path: str, names: Sequence[str], wanted: str | None, columns: str | Mapping[str, str] | None
) -> Schema:
    """The schema to read a file with columns `names` by, its column names spelt as in the file.

    `wanted` forces a format, `columns` are the user's; otherwise the names tell. Raises UserError.
    """
    known = {schema.name: schema for schema in FORMATS}
    if wanted is not None and wanted not in (*known, "columns"):
        raise unknown("trace format", wanted, (*known, "columns"))
    if columns is not None:
        if wanted not in (None, "columns"):
            raise UserError(f"format {wanted} has its own columns; give one of format and columns")
        return _located(path, names, parse_columns(columns))
    if wanted == "columns":
        raise UserError("format columns needs the names: arrival=COLUMN,prompt=COLUMN,...")
    if wanted is not None:
        return _located(path, names, known[wanted])
    have = {normalise(name) for name in names}
    for schema in FORMATS:
        look_alike = {normalise(name) for name in NOT_THESE.get(schema.name, ())}
        if all(normalise(c) in have for c in schema.columns.values()) and not look_alike & have:
            return _located(path, names, schema)
    listed = ", ".join(printable(name) for name in names[:12]) + (", ..." if names[12:] else "")
    raise UserError(
        f"{path}: format not recognised (known: {', '.join(known)}); name its columns with "
        f"--columns arrival=COLUMN,prompt=COLUMN,output=COLUMN; it has: {listed or 'none'}"
    )


def _located(path: str, names: Sequence[str], schema: Schema) -> Schema:
    """`schema` with the file's own spelling."""
    return replace(schema, columns=spelt(path, names, schema.columns))


def spelt(path: str, names: Sequence[str], columns: Mapping[str, str]) -> dict[str, str]:
    """`columns` (role -> column) as the file with columns `names` spells them: exactly so, else
    the only one that is equal but for case and punctuation. UserError for none, or several."""
    located = {}
    for role, column in columns.items():
        found = [name for name in names if name == column]
        found = found or [name for name in names if normalise(name) == normalise(column)]
        if len(found) > 1:
            raise UserError(f"{path}: column {printable(column)} occurs {len(found)} times")
        if not found:
            error = unknown("column", printable(column), [printable(name) for name in names])
            raise UserError(f"{path}: {error}")
        located[role] = found[0]
    return located
