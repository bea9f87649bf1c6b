"""What is wrong with a file is said in one line: file, line, reason. Or skipped, and counted."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

import traces
from sim.errors import UserError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:15:46.6805900,374,44\n"
MOON = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'


def message(path: Path | str, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        traces.load(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1000
    return text


BAD_ROWS = {
    "empty-cell": (",5,5", "malformed", "arrival (TIMESTAMP) is empty"),
    "no-date": ("yesterday,5,5", "malformed", "'yesterday', not a date and time"),
    "no-such-day": ("2023-02-29 00:00:00,5,5", "malformed", "day is out of range"),
    "seconds-60": ("2023-02-28 00:00:60,5,5", "malformed", "second must be in 0..59"),
    "year-0": ("0000-01-01 00:00:00,5,5", "malformed", "is '0000-01-01 00:00:00'"),
    "year-1600": ("1600-01-01 00:00:00,5,5", "range", "outside the years 1678 to 2261"),
    "few-cells": ("2023-11-16 18:15:46,5", "malformed", "expected 3 cells, found 2"),
    "many-cells": ("2023-11-16 18:15:46,5,5,5", "malformed", "expected 3 cells, found 4"),
    "negative": ("2023-11-16 18:15:46,-5,5", "negative", "prompt (ContextTokens) is '-5'"),
    "zero-prompt": ("2023-11-16 18:15:46,0,5", "zero", "prompt (ContextTokens) is 0"),
    "zero-output": ("2023-11-16 18:15:46,5,0.0", "zero", "output (GeneratedTokens) is 0"),
    "nan": ("2023-11-16 18:15:46,NaN,5", "malformed", "'NaN', not a number"),
    "inf": ("2023-11-16 18:15:46,5,inf", "malformed", "'inf', not a number"),
    "fraction": ("2023-11-16 18:15:46,5.5,5", "malformed", "'5.5', not a whole number"),
    "int32": ("2023-11-16 18:15:46,2147483648,5", "range", "more than 2147483647"),
    "int64": ("2023-11-16 18:15:46,18446744073709551617,5", "range", "more than 2147483647"),
    "huge": ("2023-11-16 18:15:46,1e300,5", "range", "out of range"),
    "words": ("2023-11-16 18:15:46,five,5", "malformed", "'five', not a number"),
    "thousands": ("2023-11-16 18:15:46,1_000,5", "malformed", "'1_000', not a number"),
    "digits-of-others": ("2023-11-16 18:15:46,٣,5", "malformed", "not a number"),
    "quote": ('"2023-11-16 18:15:46,5,5', "malformed", "a quote is not closed"),
    "bytes": ("2023-11-16 18:15:46,\udcff,5", "malformed", "not a number"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_row_is_named_or_skipped_and_counted(tmp_path, case):
    row, kind, reason = BAD_ROWS[case]
    path = tmp_path / "trace.csv"
    path.write_bytes((AZURE + GOOD + row + "\n" + GOOD).encode(errors="surrogateescape"))
    text = message(path)
    assert text.startswith(f"{path}: line 3: ")
    assert reason in text
    assert "--skip-bad-rows" in text
    trace = traces.load(path, skip_bad_rows=True)
    assert trace.prompt_tokens.tolist() == [374, 374]
    counts = {"rows_read": 3, "rows_reordered": 0, "rows_skipped": 1, f"rows_skipped_{kind}": 1}
    assert trace.counts == counts


BAD_LINES = {
    "cut": (MOON[:50], "truncated", "ends early"),
    "cut-string": ('{"timestamp": 0, "inp', "truncated", "ends early"),
    "list": ("[1]", "malformed", "is not a JSON object: '[1]'"),
    "junk": ('{"a": b}', "malformed", "is not JSON"),
    "deep": ("[" * 100_000, "malformed", "is not JSON (nested too deep)"),
    "digits": (MOON.replace("600", "6" * 5000).strip(), "malformed", "too many digits"),
    "nan": (MOON.replace("600", "NaN").strip(), "malformed", "prompt (input_length) is nan"),
    "true": (MOON.replace("600", "true").strip(), "malformed", "is True, not a number"),
    "null": (MOON.replace("600", "null").strip(), "malformed", "(input_length) is empty"),
    "negative": (MOON.replace(": 0,", ": -1,").strip(), "negative", "before the clock's start"),
    "late": (MOON.replace(": 0,", ": 1e16,").strip(), "range", "beyond the 64-bit clock"),
    "few-ids": (MOON.replace("[0, 1]", "[]").strip(), "malformed", "hash_ids has 0 blocks"),
    "many-ids": (MOON.replace("[0, 1]", "[0, 1, 2]").strip(), "malformed", "2 blocks of 512"),
    "float-ids": (MOON.replace("[0, 1]", "[0, 1.0]").strip(), "malformed", "not a list of whole"),
    "no-ids": (MOON.replace("[0, 1]", "7").strip(), "malformed", "not a list of whole"),
    "id-range": (MOON.replace("[0, 1]", "[0, -1]").strip(), "range", "an id outside"),
    "bytes": ('{"timestamp": "\udcff"}', "malformed", "not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_json_line_is_named_or_skipped_and_counted(tmp_path, case):
    line, kind, reason = BAD_LINES[case]
    path = tmp_path / "trace.jsonl"
    path.write_bytes((MOON + "\n" + line + "\n" + MOON).encode(errors="surrogateescape"))
    text = message(path)
    assert text.startswith(f"{path}: line 3: ")
    assert reason in text
    trace = traces.load(path, skip_bad_rows=True)
    assert len(trace) == 2
    assert trace.counts["rows_skipped"] == trace.counts[f"rows_skipped_{kind}"] == 1


def test_bad_parquet_cell_is_named_or_skipped_and_counted(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    columns = "arrival=t,prompt=p,output=o"
    for bad, reason in [(None, "is empty"), (0, "is 0;"), (-1, "less than 1"), (2**40, "more")]:
        pq.write_table(pa.table({"t": [0.5, 1.5], "p": [5, bad], "o": [1, 1]}), path)
        assert f"row 2: prompt (p) is {bad or ''}".strip() in message(path, columns=columns) or bad
        assert reason in message(path, columns=columns)
        assert len(traces.load(path, columns=columns, skip_bad_rows=True)) == 1
    for bad in (float("nan"), float("inf"), -1.0, 1e300):
        pq.write_table(pa.table({"t": [0.5, bad], "p": [5, 5], "o": [1, 1]}), path)
        assert "row 2: arrival (t) is" in message(path, columns=columns)
    pq.write_table(pa.table({"t": [0.5, 1], "p": [[5], [5]], "o": [1, 1]}), path)
    assert "row 1: prompt (p) is [5], not a number" in message(path, columns=columns)


EMPTY = {
    "empty": (b"", "is empty"),
    "blank": (b"\n \r\n", "is blank"),
    "byte-order-mark": (b"\xef\xbb\xbf", "is blank"),
    "header": (AZURE.encode(), "has a header, but no rows"),
    "header-no-newline": (AZURE.strip().encode(), "has a header, but no rows"),
    "gzip-of-nothing": (gzip.compress(b""), "is empty"),
    "no-header": (b"1,2,3\n", "line 1: has no header naming the columns"),
    "unknown": (b"foo,bar\n1,2\n", "format not recognised (known: azure, mooncake, vidur)"),
    "open-header": (b'"foo,bar\n1,2\n', "line 1: a quote in the header is not closed"),
    "array": (b'[{"a": 1}]', "is a JSON array"),
    "indented": (b'{\n"a": 1\n}', "no line of it is a JSON object"),
    "utf16": ("a,b".encode("utf-16"), "is UTF-16 text"),
    "zip": (b"PK\x03\x04...", "is a zip archive; unpack it first"),
    "zstd": (b"\x28\xb5\x2f\xfd...", "is zstd-compressed"),
    "binary": (bytes(range(256)) * 9, "is binary"),
    "parquet-magic": (b"PAR1", "is not readable Parquet"),
    "parquet-junk": (b"PAR1" + b"x" * 99 + b"PAR1", "is not readable Parquet"),
    "gzip-head": (b"\x1f\x8b", "the gzip data ends early"),
    "gzip-junk": (b"\x1f\x8b" + b"x" * 99, "the gzip data is damaged"),
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("skip", [False, True])
def test_file_without_a_usable_row(tmp_path, case, skip):
    content, reason = EMPTY[case]
    path = tmp_path / "trace"
    path.write_bytes(content)
    text = message(path, skip_bad_rows=skip)
    assert text.startswith(f"{path}: ")
    assert reason in text


def test_all_rows_bad(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + "x,1,1\n" * 3)
    text = message(path, skip_bad_rows=True)
    assert "no usable row (3 skipped; line 2: arrival (TIMESTAMP) is 'x'" in text


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_truncated_gzip_keeps_the_whole_lines_before_the_end(tmp_path, name):
    # random content, so that deflate emits blocks early
    noise = os.urandom(40_000).hex()
    lines = [MOON.strip()[:-1] + f', "x": "{noise[i : i + 40]}"}}' for i in range(0, 80_000, 40)]
    header = []
    if name == "csv":
        header = [AZURE.strip() + ",x"]
        lines = [GOOD.strip() + "," + noise[i : i + 40] for i in range(0, 80_000, 40)]
    packed = gzip.compress("\n".join(header + lines).encode())
    path = tmp_path / "trace.gz"
    path.write_bytes(packed[: len(packed) // 2])
    text = message(path)
    assert "the gzip data ends early" in text
    trace = traces.load(path, skip_bad_rows=True)
    assert 500 < len(trace) < 2000
    assert f"line {len(trace) + len(header) + 1}: " in text
    assert trace.counts["rows_skipped_truncated"] == 1
    broken = bytearray(packed)
    broken[-8] ^= 1  # the checksum
    path.write_bytes(bytes(broken))
    assert "the gzip data is damaged" in message(path)


def test_places_that_are_no_trace(tmp_path, monkeypatch):
    assert "is a directory" in message(tmp_path)
    assert "cannot be read: No such file" in message(tmp_path / "nothing.csv")
    assert "is not a regular file" in message("/dev/null")
    assert "cannot be read" in message("a\0b")
    assert "cannot be read: File name too long" in message("x" * 5000)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "t.csv"
    path.write_text(AZURE + GOOD)
    monkeypatch.setattr(Path, "open", refuse)
    assert "cannot be read: Permission denied" in message(path)


def test_wrong_names_get_the_nearest_match(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("ts,in_tok,out_tok,out_tok\n1,2,3,4\n")
    columns = "arrival=ts,prompt=in_tok,output=ts"
    assert len(traces.load(path, columns=columns)) == 1
    assert "did you mean 'in_tok'" in message(path, columns=columns.replace("in_tok", "n_tok"))
    assert "did you mean 'prompt'" in message(path, columns=columns.replace("prompt", "promt"))
    assert "did you mean 'azure'" in message(path, format="azur")
    assert "occurs 2 times" in message(path, columns="arrival=ts,prompt=in_tok,output=out_tok")
    assert "prompt=COLUMN is missing" in message(path, columns="arrival=ts,output=out_tok")
    assert "arrival is named twice" in message(path, columns=columns + ",arrival_ms=ts")
    assert "not of the form role=column" in message(path, columns="ts")
    assert "give one of" in message(path, format="azure", columns=columns)
    assert "needs the names" in message(path, format="columns")
    assert "no arrival times (columns)" in message(path, columns="prompt=in_tok,output=ts")
    assert "unknown column 'TIMESTAMP'" in message(path, format="azure")
    path.write_text('{"timestamp": 1, "input_length": 5, "output_length": 5, "chat_id": 1}')
    assert "it has: timestamp, input_length, output_length, chat_id" in message(path)


def test_seconds_that_must_be_milliseconds(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("t,p,o\n1700000000000,1,1\n")
    text = message(path, columns="arrival=t,prompt=p,output=o")
    assert "line 2: " in text
    assert "is it in milliseconds (arrival_ms=...)?" in text


def test_options_out_of_range(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(AZURE + GOOD)
    assert "limit must be at least 1" in message(path, limit=0)
    assert "0 <= start < end" in message(path, start_s=2, end_s=1)
    assert "0 <= start < end" in message(path, end_s=float("nan"))
    assert "rate scale must be above 0" in message(path, rate_scale=0)
    assert "from 1e-9 to 1e9, not 1e-300" in message(path, rate_scale=1e-300)
    assert "from 1e-9 to 1e9, not 1e+22" in message(path, rate_scale=1e22)
    assert "rate scale must be above 0" in message(path, rate_scale=float("inf"))
    assert "arrivals span 0 to 0.000 s" in message(path, start_s=5)
    path.write_text(AZURE + GOOD + "1700-01-01 00:00:00,1,1\n")
    assert "arrivals span 323 years; a bad date?" in message(path)
    path.write_text(AZURE + GOOD + "2024-01-01 00:00:00,1,1\n")
    assert "beyond the 64-bit clock" in message(path, rate_scale=1e-9)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_long_stretches_of_blank_lines_are_nothing(tmp_path: Path, end: str, place: int) -> None:
    """Longer than a block: a block without a row."""
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:01,5,3"]
    rows += ["2024-05-10 00:00:02,6,4"]
    rows[place] += end * 5_000_000
    path = tmp_path / "blank.csv"
    path.write_bytes(end.join(rows).encode())
    assert traces.load(path).prompt_tokens.tolist() == [5, 6]
