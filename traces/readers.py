"""`load`: a trace file of any format that is read, as a Trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from sim.errors import UserError
from sim.request import Trace

from . import transforms
from .arrivals import MAX_SECONDS, ArrivalProcess
from .csv_rows import CsvReader, read_layout
from .json_rows import JsonReader, first_keys
from .parquet_rows import ParquetReader
from .rows import Columns, Selection
from .schema import Schema, choose
from .segments import from_hash_ids
from .source import BadRows, Source
from .spec import parse_arrivals

LONGEST_NS = round(MAX_SECONDS * 1e9)


def load(
    path: str | Path,
    *,
    format: str | None = None,
    columns: str | Mapping[str, str] | None = None,
    skip_bad_rows: bool = False,
    limit: int | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    rate_scale: float = 1.0,
    arrivals: ArrivalProcess | str | None = None,
    seed: int | np.random.Generator = 0,
) -> Trace:
    """Read the trace at `path` (plain or gzip; CSV, JSON lines or Parquet, told by the content).

    format: azure, mooncake or vidur; None detects it (`Trace.format` says which).
    columns: names for any other file, `arrival=ts,prompt=in_tok,output=out_tok` or a mapping;
        optional roles priority, tenant, session, id, hash_ids (blocks of 512 tokens). `arrival` is
        seconds or ISO dates; `arrival_ms`, `arrival_us`, `arrival_ns` are other units.
    skip_bad_rows: count rows that cannot be used (`Trace.counts`) instead of failing at the first.
    start_s, end_s: keep start_s <= arrival < end_s, in seconds from the first arrival of the file.
    limit: keep the earliest `limit` of those.
    rate_scale: divide arrival times, so that requests come `rate_scale` times as fast.
    arrivals: a process, or its text such as `poisson:rate=8`, that gives arrivals to a file that
        has none (vidur), or replaces those it has. Its random numbers come from `seed`.

    Time 0 of the trace is the file's first arrival, or `start_s` after it. Rows out of order are
    sorted (stably) and counted. A file in order is read no further than `limit` and `end_s` need.
    Raises UserError, one line with file, line and reason.
    """
    selection = _selection(limit, start_s, end_s)
    transforms.check_rate_scale(rate_scale)
    process = parse_arrivals(arrivals) if isinstance(arrivals, str) else arrivals
    reader = _Reader(Source(path), format, columns)
    if not reader.schema.has_arrivals:
        if process is None:
            raise UserError(
                f"{reader.source.shown}: has lengths but no arrival times ({reader.schema.name}); "
                "give it an arrival process, for example --arrivals poisson:rate=8"
            )
        reader_selection = Selection(limit=None if selection.windowed else limit)
    elif process is not None:
        reader_selection = Selection(limit=None if selection.windowed else limit)
    else:
        reader_selection = selection
    trace = reader.read(reader_selection, BadRows(reader.source.shown, skip_bad_rows))
    if process is not None:
        trace = transforms.with_arrivals(trace, process, seed)
        if selection.windowed:
            trace = transforms.window(trace, start_s, end_s)
            trace = trace if limit is None else transforms.limit(trace, limit)
    return transforms.scale_rate(trace, rate_scale)


def load_lengths(
    path: str | Path, *, format: str | None = None, columns: str | Mapping[str, str] | None = None
) -> Trace:
    """Like `load`, for the lengths alone: a file without arrivals is fine (they are all 0)."""
    reader = _Reader(Source(path), format, columns)
    return reader.read(Selection(), BadRows(reader.source.shown))


def _selection(limit: int | None, start_s: float | None, end_s: float | None) -> Selection:
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1 request, not {limit}")
    start_ns, end_ns = transforms.window_ns(start_s, end_s)
    return Selection(start_ns, end_ns, limit)


class _Reader:
    """One file, its container opened and its schema chosen."""

    def __init__(
        self, source: Source, format: str | None, columns: str | Mapping[str, str] | None
    ) -> None:
        self.source = source
        self.parquet = ParquetReader(source) if source.parquet else None
        self.json = source.json
        if self.parquet is not None:
            names = self.parquet.names
        elif self.json:
            names = first_keys(source)
        else:
            self.layout = read_layout(source.shown, source.head)
            names = self.layout.names
        self.schema: Schema = choose(source.shown, names, format, columns)

    def read(self, selection: Selection, bad: BadRows) -> Trace:
        """The trace of what `selection` keeps."""
        for columns in self._blocks(bad):
            selection.add(columns)
            if selection.done:
                break
        if not selection.rows_read:
            if bad.total:
                reason = f"has no usable row ({bad.total} skipped; {bad.first})"
            else:
                reason = "has a header, but no rows"
            raise UserError(f"{self.source.shown}: {reason}")
        if selection.missed:
            # an earlier arrival turned up after the window's start had been settled
            again = Selection(
                selection.start_ns, selection.end_ns, selection.limit, selection.first_ns
            )
            return self.read(again, BadRows(bad.path, bad.skip))
        return self._trace(selection, bad)

    def _blocks(self, bad: BadRows) -> Iterator[Columns]:
        if self.parquet is not None:
            schema = self.schema
            if schema.has_arrivals and schema.unit == "auto":
                schema = schema.with_unit_of(list(self.parquet.arrivals_in(schema)))
            yield from self.parquet.parse(schema, bad)
            return
        reader: CsvReader | JsonReader | None = None
        for first_line, text in self.source.blocks(bad, quotes=not self.json):
            line, block = first_line, text
            if reader is None:
                if not self.json:
                    block = text.split(b"\n", self.layout.header_line)[-1]
                    line = self.layout.header_line + 1
                reader = self._text_reader(block, bad)
            yield reader.parse(line, block)

    def _text_reader(self, block: bytes, bad: BadRows) -> CsvReader | JsonReader:
        def reader(schema: Schema) -> CsvReader | JsonReader:
            if self.json:
                return JsonReader(schema, bad)
            return CsvReader(self.layout, schema, bad)

        plain = reader(self.schema)
        if self.schema.has_arrivals and self.schema.unit == "auto":
            sample = block[: 1 << 16]
            return reader(self.schema.with_unit_of(list(plain.arrivals_in(sample))))
        return plain

    def _trace(self, selection: Selection, bad: BadRows) -> Trace:
        columns, counts = selection.finish()
        shown = self.source.shown
        if not len(columns["prompt"]):
            first, last = selection.first_ns, selection.last_ns
            raise UserError(
                f"{shown}: has no requests in that window; its arrivals span 0 to "
                f"{(last - first) / 1e9:.3f} s" + (" (or more)" if selection.done else "")
            )
        counts["rows_read"] += bad.total
        counts["rows_skipped"] = bad.total
        for kind, count in sorted(bad.counts.items()):
            counts[f"rows_skipped_{kind}"] = count
        prompt = columns.pop("prompt").astype(np.int64)
        arrival = columns.pop("arrival", None)
        if arrival is None:
            arrival = np.zeros(len(prompt), dtype=np.int64)
        else:
            origin = selection.origin + selection.start_ns
            if int(arrival[-1]) - origin > LONGEST_NS:
                years = (int(arrival[-1]) - origin) / 3.156e16
                raise UserError(
                    f"{shown}: its arrivals span {math.floor(years)} years; a bad date?"
                )
            arrival = arrival - origin
        labels = {
            role: columns[role].tolist() for role in ("id", "tenant", "session") if role in columns
        }
        return Trace(
            name=self.source.path.name,
            format=self.schema.name,
            arrival_ns=arrival,
            prompt_tokens=prompt,
            output_tokens=columns.pop("output").astype(np.int64),
            segments=from_hash_ids(prompt, columns["hash_ids"], self.schema.block_tokens)
            if "hash_ids" in columns
            else None,
            ids=labels.get("id"),
            priority=columns.get("priority"),
            tenant=labels.get("tenant"),
            session=labels.get("session"),
            counts=counts,
        )
