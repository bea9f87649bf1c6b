"""Whatever the bytes, loading gives a sound trace or one line; fast and careful parsing agree."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces
from sim.errors import UserError
from sim.request import Trace
from traces import csv_rows, readers, source

COLUMNS = "arrival=t,prompt=p,output=o"
ROUNDS = 250


def outcome(path: Path, **options: object) -> tuple[object, ...]:
    """A sound trace as plain values, or the error's text; anything else is a failure."""
    try:
        trace = traces.load(path, **options)
    except UserError as error:
        text = str(error)
    else:
        return sound(trace)
    assert "\n" not in text
    assert len(text) < 1500
    return (text,)


def sound(trace: Trace) -> tuple[object, ...]:
    arrival, prompt, output = trace.arrival_ns, trace.prompt_tokens, trace.output_tokens
    assert len(arrival) == len(prompt) == len(output) > 0
    assert arrival[0] >= 0
    assert (np.diff(arrival) >= 0).all()
    assert prompt.min() >= 1
    assert output.min() >= 1
    for request in trace:
        assert sum(part.length for part in request.prompt_segments()) == request.prompt_tokens
    counts = dict(trace.counts)
    return arrival.tolist(), prompt.tolist(), output.tolist(), counts, trace.tenant


def azure(rng: random.Random) -> bytes:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for i in range(rng.randrange(1, 12)):
        zone = rng.choice(["", "", "+00:00", "Z", "+05:30"])
        lines.append(f"2024-05-01 00:00:{i:02}.{rng.randrange(10**7)}{zone},{i + 1},{i + 5}")
    return rng.choice(["\n", "\r\n"]).join(lines).encode()


def mooncake(rng: random.Random) -> bytes:
    lines = []
    for i in range(rng.randrange(1, 8)):
        n = rng.randrange(1, 3000)
        ids = [rng.randrange(9) for _ in range(-(-n // 512))]
        row = {"timestamp": i, "input_length": n, "output_length": i + 1, "hash_ids": ids}
        lines.append(json.dumps(row))
    return "\n".join(lines).encode()


def vidur(rng: random.Random) -> bytes:
    rows = "".join(f'{rng.randrange(1, 99)},{rng.randrange(1, 9)},"a"\n' for _ in range(5))
    return ("num_prefill_tokens,num_decode_tokens,x\n" + rows).encode()


def parquet(rng: random.Random) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    n = rng.randrange(1, 9)
    sink = pa.BufferOutputStream()
    numbers = [rng.randrange(1, 99) for _ in range(n)]
    pq.write_table(pa.table({"t": [i / 7 for i in range(n)], "p": numbers, "o": numbers}), sink)
    return sink.getvalue().to_pybytes()


TOKENS = [
    b",",
    b"\n",
    b"\r",
    b'"',
    b"\0",
    b"-",
    b"e9",
    b"nan",
    b"\xff",
    b"{",
    b"]",
    b"9" * 30,
    b".",
]


def mutate(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at:at] = rng.choice(TOKENS)
            case 2:
                del data[at : at + rng.randrange(1, 20)]
            case 3:
                del data[at:]
            case 4:
                data[at:at] = data[at : at + rng.randrange(40)]
            case 5 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("make", [azure, mooncake, vidur, parquet], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("error")
def test_mutated_files_give_a_sound_trace_or_a_user_error(tmp_path, make):
    rng = random.Random(make.__name__)
    path = tmp_path / "trace"
    errors = 0
    for i in range(ROUNDS):
        content = mutate(make(rng), rng)
        if i % 4 == 1:
            content = gzip.compress(content)
        if i % 4 == 2:
            content = mutate(gzip.compress(content), rng)
        path.write_bytes(content)
        options: dict[str, object] = {"arrivals": "poisson:rate=1"} if make is vidur else {}
        if make is parquet:
            options["columns"] = COLUMNS
        errors += len(outcome(path, **options)) == 1
        outcome(path, **options, skip_bad_rows=True)
    assert ROUNDS // 4 < errors < ROUNDS


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes(tmp_path_factory, content, skip):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    outcome(path, skip_bad_rows=skip)
    outcome(path, skip_bad_rows=skip, columns=COLUMNS)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet='tpo,"\n\r 0123456789.-:TZe+\ufeffé;', max_size=200))
def test_any_csv_like_text(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_text("t,p,o\n" + text, newline="")
    outcome(path, columns=COLUMNS)
    outcome(path, columns=COLUMNS, skip_bad_rows=True)


def digits(low: int, high: int) -> st.SearchStrategy[str]:
    return st.text("0123456789", min_size=low, max_size=high)


dates = st.one_of(
    st.datetimes().map(lambda d: d.isoformat(" ")),
    st.builds("20{}-0{}-{} 0{}:{}:{}".format, *[digits(1, 2)] * 6),
    st.builds("2024-02-2{} 23:59:59.{}{}".format, digits(1, 1), digits(0, 11),
              st.sampled_from(["", "Z", "+00:00", "+0000", "-00:01", " UTC", "z"])),
)  # fmt: skip
numbers = st.one_of(
    digits(0, 21),
    st.builds("{}.{}".format, digits(0, 20), digits(0, 12)),
    st.integers(-99, 9999).map(str),
    st.floats().map(repr),
    st.sampled_from(["9223372036.854775807", "9223372036.854775808", "9223372036854775808", "1e3"]),
)
UNITS = ["arrival", "arrival_s", "arrival_ms", "arrival_us", "arrival_ns"]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(UNITS),
    st.lists(st.tuples(st.one_of(numbers, dates), numbers, digits(1, 11)), min_size=1, max_size=8),
    st.sampled_from(["\n", "\r\n"]),
)
def test_fast_and_careful_parsing_agree(tmp_path_factory, unit, cells, end):
    path = tmp_path_factory.getbasetemp() / "cells"
    path.write_text(end.join(["t,p,o", "0,1,1", *map(",".join, cells)]), newline="")

    def careful(self, block, text, starts, ends):
        columns, good = at_once(self, block, text, starts, ends)
        return columns, np.zeros_like(good)

    at_once = csv_rows.CsvReader._at_once
    options = {"columns": f"{unit}=t,prompt=p,output=o"}
    fast = [outcome(path, **options, skip_bad_rows=skip) for skip in (True, False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_rows.CsvReader, "_at_once", careful)
        slow = [outcome(path, **options, skip_bad_rows=skip) for skip in (True, False)]
        patch.setattr(csv_rows.CsvReader, "parse", csv_rows.CsvReader._one_by_one)
        quoted = [outcome(path, **options, skip_bad_rows=skip) for skip in (True, False)]
    assert fast == slow == quoted


@settings(max_examples=100, deadline=None)
@given(st.dates(), st.times(), digits(0, 9))
def test_dates_agree_with_the_standard_library(tmp_path_factory, day, time, fraction):
    from datetime import UTC, datetime

    if not 1680 <= day.year <= 2260:
        return
    stamp = f"{day} {time.replace(microsecond=0)}" + (f".{fraction}" if fraction else "")
    path = tmp_path_factory.getbasetemp() / "dates"
    path.write_text(f"t,p,o\n{stamp},1,1\n1970-01-01,2,1\n")
    second = datetime(day.year, day.month, day.day, time.hour, time.minute, time.second, tzinfo=UTC)
    since = second - datetime(1970, 1, 1, tzinfo=UTC)
    expected = (since.days * 86_400 + since.seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))
    if abs(expected) >= 2**62:
        return
    if abs(expected) > readers.LONGEST_NS:
        with pytest.raises(UserError, match="a bad date"):
            traces.load(path, columns=COLUMNS)
        return
    trace = traces.load(path, columns=COLUMNS)
    assert trace.arrival_ns.tolist() == [0, abs(expected)]


def test_an_unclosed_quote_does_not_swallow_a_long_file(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "READ_BYTES", 1 << 10)
    monkeypatch.setattr(source, "LINE_BYTES", 1 << 14)
    path = tmp_path / "trace"
    path.write_text('t,p,o\n1,1,1\n"2,2,2\n' + "3,3,3\n" * 10_000)
    (error,) = outcome(path, columns=COLUMNS)
    assert "line 3: a quote is not closed" in str(error)
    trace = traces.load(path, columns=COLUMNS, skip_bad_rows=True)
    assert len(trace) == 10_001
    path.write_text("t,p,o\n" + "3" * 20_000)
    (error,) = outcome(path, columns=COLUMNS)
    assert "line 2: no end within" in str(error)
