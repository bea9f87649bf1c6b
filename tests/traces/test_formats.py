"""Every format, read as it is: values exact, order and counts as promised."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

import traces
from sim.errors import UserError
from sim.request import Segment, Trace, prompt_key
from traces import source

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def read(tmp_path: Path, content: str | bytes, name: str = "trace", **options: object) -> Trace:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return traces.load(path, **options)


def rows(trace: Trace) -> list[tuple[int, int, int]]:
    return list(
        zip(
            trace.arrival_ns.tolist(),
            trace.prompt_tokens.tolist(),
            trace.output_tokens.tolist(),
            strict=True,
        )
    )


def test_azure_reads_seven_digits_exactly_without_final_newline(tmp_path):
    text = AZURE + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951691,396,109"
    trace = read(tmp_path, text)
    assert trace.format == "azure"
    assert trace.name == "trace"
    assert rows(trace) == [(0, 374, 44), (4_314_579_100, 396, 109)]
    assert trace.counts == {"rows_read": 2, "rows_reordered": 0, "rows_skipped": 0}
    assert trace.request(1).prompt_segments() == (Segment(prompt_key(1), 0, 396),)


def test_azure_2024_time_zones_and_fractions_of_any_width(tmp_path):
    text = AZURE + (
        "2024-05-12 23:59:59+00:00,1,1\n"
        "2024-05-13 00:00:00.001163+00:00,2,1\n"
        "2024-05-13T00:00:00.5Z,3,1\n"
        "2024-05-13 02:00:00.600000001+02:00,4,1\n"
        "2024-05-12 19:30:00.7-0430,5,1\n"
        "2024-05-13 00:00,6,1\n"
    )
    trace = read(tmp_path, text)
    assert [(t, p) for t, p, _ in rows(trace)] == [
        (0, 1),
        (10**9, 6),
        (1_001_163_000, 2),
        (1_500_000_000, 3),
        (1_600_000_001, 4),
        (1_700_000_000, 5),
    ]
    assert trace.counts["rows_reordered"] == 1


@pytest.mark.shared
def test_azure_public_traces_agree_with_a_plain_reading(shared_dir):
    path = shared_dir / "traces" / "AzureLLMInferenceTrace_conv.csv"
    trace = traces.load(path)
    expected = []
    for line in path.read_text().splitlines()[1:]:
        stamp, prompt, output = line.split(",")
        second = datetime.fromisoformat(stamp[:19]).replace(tzinfo=UTC)
        nanoseconds = int(second.timestamp()) * 10**9 + int(stamp[20:].ljust(9, "0"))
        expected.append((nanoseconds, int(prompt), int(output)))
    first = expected[0][0]
    assert rows(trace) == [(t - first, p, o) for t, p, o in expected]
    assert len(trace) == 19_366


@pytest.mark.shared
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_mooncake_public_traces_share_prefixes_block_by_block(shared_dir, name):
    path = shared_dir / "traces" / f"mooncake_{name}_trace.jsonl.gz"
    trace = traces.load(path)
    assert trace.format == "mooncake"
    with gzip.open(path, "rt") as file:
        records = [json.loads(line) for line in file]
    assert rows(trace) == [
        (r["timestamp"] * 10**6, r["input_length"], r["output_length"]) for r in records
    ]
    for request, record in zip(trace, records, strict=True):
        segments = request.prompt_segments()
        assert sum(part.length for part in segments) == request.prompt_tokens
        # every 512 tokens stand at a place of their own, the same place for the same id
        starts = [s for part in segments for s in range(part.start, part.start + part.length, 512)]
        assert starts == [512 * block for block in record["hash_ids"]]
        assert {part.content for part in segments} == {0}


def test_hash_ids_may_be_any_integers_and_leave_out_the_last_partial_block(tmp_path):
    big = 2**63 - 1
    lines = [
        {"timestamp": 5, "input_length": 1100, "output_length": 1, "hash_ids": [big, 7, 8]},
        {"timestamp": 6, "input_length": 1100, "output_length": 2, "hash_ids": [big, 9]},
        {"timestamp": 7, "input_length": 100, "output_length": 2, "hash_ids": []},
    ]
    trace = read(tmp_path, "\n".join(map(json.dumps, lines)))
    first, second, third = trace.segments
    # numbered 0, 1, 2, 3 by first appearance
    assert first == (Segment(0, 0, 1100),)
    assert second == (
        Segment(0, 0, 512),
        Segment(0, 3 * 512, 512),
        Segment(prompt_key(1), 0, 76),
    )
    assert third == (Segment(prompt_key(2), 0, 100),)
    assert trace.segments[-1] == third
    assert trace.segments[1:] == [second, third]
    with pytest.raises(IndexError):
        trace.segments[3]


@pytest.mark.shared
def test_vidur_needs_an_arrival_process_and_keeps_its_order(shared_dir):
    path = shared_dir / "traces" / "vidur_arxiv_summarization_lengths.csv.gz"
    with pytest.raises(UserError, match=r"no arrival times.*--arrivals poisson:rate=8"):
        traces.load(path)
    trace = traces.load(path, arrivals="constant:rate=4", limit=10)
    assert trace.format == "vidur"
    assert trace.arrival_ns.tolist() == [250_000_000 * i for i in range(10)]
    assert rows(trace)[1][1:] == (2015, 156)
    assert trace.counts["arrivals_generated"] == 10
    window = traces.load(path, arrivals="constant:rate=4", start_s=1, end_s=2, limit=3)
    assert rows(window) == [(t - 10**9, p, o) for t, p, o in rows(trace)[4:7]]


NAMED = "arrival=ts,prompt=in tok,output=out_tok"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_with_named_columns(tmp_path, delimiter):
    text = 'model,ts,"in tok",out_tok\na,1.25,10,1\nb,1.5,20.0,2\n\n"c,|;\t",+2e0, 30,3\n'
    text = text.replace(",", "\0").replace("c\0", "c,").replace("\0", delimiter)
    text = text.replace('"c,|;\t"', f'"c{delimiter}"')
    trace = read(tmp_path, text, columns=NAMED)
    assert trace.format == "columns"
    assert rows(trace) == [(0, 10, 1), (250_000_000, 20, 2), (750_000_000, 30, 3)]


def test_all_roles_of_named_columns(tmp_path):
    text = "t,i,o,prio,who,conv,rid\n10,1,2,-3,ann,s1,r1\n9.5,3,4,0,bob,,r2\n"
    columns = {
        "arrival_ms": "t",
        "prompt": "i",
        "output": "o",
        "priority": "prio",
        "tenant": "who",
        "session": "conv",
        "id": "rid",
    }
    for content in (text, text.replace("ann", '"a""nn"')):
        trace = read(tmp_path, content, columns=columns)
        second = trace.request(1)
        assert rows(trace) == [(0, 3, 4), (500_000, 1, 2)]
        assert (second.id, second.priority, second.session) == ("r1", -3, "s1")
        assert second.tenant == ("ann" if content is text else 'a"nn')
        assert trace.request(0).session == ""


@pytest.mark.parametrize(
    ("unit", "cell", "expected"),
    [
        ("arrival", "1700000000.123456789", 1_700_000_000_123_456_789),
        ("arrival_s", "0.1234567891", 123_456_789),
        ("arrival_ms", "1700000000123.4567", 1_700_000_000_123_456_700),
        ("arrival_us", "1700000000123456.789", 1_700_000_000_123_456_789),
        ("arrival_ns", "1700000000123456789", 1_700_000_000_123_456_789),
        ("arrival", "1e-3", 10**6),
        ("arrival", "2000-02-29 00:00:00.000000001", 951_782_400_000_000_001),
    ],
)
def test_arrival_units_are_exact_in_csv_and_json(tmp_path, unit, cell, expected):
    first = "1970-01-01" if "-02-" in cell else "0"
    columns = f"{unit}=t,prompt=p,output=o"
    trace = read(tmp_path, f"t,p,o\n{first},1,1\n{cell},2,2\n", columns=columns)
    assert trace.arrival_ns.tolist() == [0, expected]
    quoted = json.dumps(cell) if "-02-" in cell else cell
    lines = f'{{"t":{json.dumps(first)},"p":1,"o":1}}\n{{"t":{quoted},"p":2,"o":2}}'
    assert read(tmp_path, lines, columns=columns).arrival_ns.tolist() == [0, expected]


def test_jsonl_with_named_columns_and_missing_labels(tmp_path):
    text = '{"ts": 0.5, "i": 5, "o": 1, "who": "a"}\n\n{"o": 2, "ts": "1", "i": 6.0}\n'
    trace = read(tmp_path, text, columns="arrival=ts,prompt=i,output=o,tenant=who")
    assert rows(trace) == [(0, 5, 1), (500_000_000, 6, 2)]
    assert trace.tenant == ["a", ""]


def parquet(path: Path, **columns: object) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_of_plain_numbers_and_of_anything_else(tmp_path):
    import pyarrow as pa

    stamps = [datetime(2024, 5, 1, tzinfo=UTC), datetime(2024, 5, 1, 0, 0, 1, 500, tzinfo=UTC)]
    arrivals = {
        "float": [0.25, 1.2505],
        "int": pa.array([1, 2]),
        "decimal": [Decimal("0.000000001"), Decimal("1.000000001")],
        "stamp_ns": pa.array(stamps, pa.timestamp("ns", "UTC")),
        "stamp_ms": pa.array(stamps[:1] * 2, pa.timestamp("ms")),
        "text": ["2024-05-01 00:00:00", "2024-05-01 00:00:00.000000007"],
        "dictionary": pa.array(["5", "6"]).dictionary_encode(),
    }
    gaps = {
        "float": 1_000_500_000,
        "int": 10**9,
        "decimal": 10**9,
        "stamp_ns": 1_000_500_000,
        "stamp_ms": 0,
        "text": 7,
        "dictionary": 10**9,
    }
    for kind, values in arrivals.items():
        for lengths in ([3, 4], [3.0, 4.0], ["3", "4"], pa.array([3, 4], pa.uint16())):
            path = parquet(tmp_path / "t", t=values, p=lengths, o=[1, 2], x=[None, None])
            trace = traces.load(path, columns="arrival=t,prompt=p,output=o")
            assert rows(trace) == [(0, 3, 1), (gaps[kind], 4, 2)], kind


def test_azure_and_mooncake_are_recognised_in_parquet_too(tmp_path):
    azure = parquet(
        tmp_path / "a", TIMESTAMP=["2024-05-01 00:00:00"], ContextTokens=[5], GeneratedTokens=[6]
    )
    assert traces.load(azure).format == "azure"
    mooncake = parquet(
        tmp_path / "m", timestamp=[3], input_length=[513], output_length=[6], hash_ids=[[4, 9]]
    )
    trace = traces.load(mooncake)
    assert trace.format == "mooncake"
    assert trace.segments[0] == (Segment(0, 4 * 512, 512), Segment(0, 9 * 512, 1))


def test_gzip_is_told_by_content_members_and_padding_included(tmp_path):
    line = "2023-11-16 18:15:46.0000000,{},1\n"
    members = [AZURE, *(line.format(i) for i in range(1, 4))]
    content = b"".join(gzip.compress(m.encode()) for m in members) + b"\0" * 7
    assert [p for _, p, _ in rows(read(tmp_path, content, "trace.csv"))] == [1, 2, 3]
    parquet(tmp_path / "p", t=[1.0], p=[2], o=[3])
    packed = gzip.compress((tmp_path / "p").read_bytes())
    trace = read(tmp_path, packed, columns="arrival=t,prompt=p,output=o")
    assert rows(trace) == [(0, 2, 3)]


@pytest.mark.parametrize("block", [16, 50, 99])
@pytest.mark.parametrize("quote", ["", '"'])
def test_blocks_of_any_size_read_the_same(tmp_path, monkeypatch, block, quote):
    lines = [f"{i // 2}.{i},{quote}{i + 1}{quote},7,{quote}name {i}{quote}" for i in range(60)]
    text = "\ufefft,p,o,who\r\n" + "\r\n".join(lines)
    columns = "arrival=t,prompt=p,output=o,tenant=who"
    whole = read(tmp_path, text, columns=columns)
    packed = gzip.compress(text.encode())
    monkeypatch.setattr(source, "READ_BYTES", block)
    for content in (text, packed):
        parts = read(tmp_path, content, columns=columns)
        assert rows(parts) == rows(whole)
        assert parts.tenant == whole.tenant
        assert parts.counts == whole.counts


def test_unsorted_rows_are_sorted_stably_and_counted(tmp_path):
    text = "t,p,o\n10,1,1\n7,2,1\n11,3,1\n7,4,1\n11,5,1\n"
    trace = read(tmp_path, text, columns="arrival=t,prompt=p,output=o")
    assert [p for _, p, _ in rows(trace)] == [2, 4, 1, 3, 5]
    assert trace.counts["rows_reordered"] == 2


@pytest.mark.parametrize(
    ("order", "block"), [("sorted", 24), ("sorted", 1 << 20), ("late-first", 1 << 20)]
)
def test_window_and_limit_count_from_the_first_arrival(tmp_path, monkeypatch, block, order):
    times = list(range(100, 160))
    if order == "late-first":
        times.append(times.pop(0))  # the first arrival is the last row of the file
    text = "t,p,o\n" + "".join(f"{t},{t},1\n" for t in times)
    monkeypatch.setattr(source, "READ_BYTES", block)
    columns = "arrival=t,prompt=p,output=o"
    trace = read(tmp_path, text, columns=columns, start_s=10, end_s=20.5, limit=4, rate_scale=2)
    assert rows(trace) == [(i * 5 * 10**8, 110 + i, 1) for i in range(4)]
    if block > len(text):
        assert trace.counts == {
            "rows_read": 60,
            "rows_reordered": int(order != "sorted"),
            "rows_outside_window": 49,
            "rows_over_limit": 7,
            "rows_skipped": 0,
        }
    elif order == "sorted":
        assert trace.counts["rows_read"] < 20  # the rest of the file was left alone


@pytest.mark.parametrize("block", [24, 1 << 20])
def test_window_of_a_file_whose_first_arrival_comes_last(tmp_path, monkeypatch, block):
    text = "t,p,o\n" + "".join(f"{t},{t},1\n" for t in [*range(101, 160), 100])
    monkeypatch.setattr(source, "READ_BYTES", block)
    trace = read(tmp_path, text, columns="arrival=t,prompt=p,output=o", start_s=10)
    assert rows(trace) == [(i * 10**9, 110 + i, 1) for i in range(50)]
    assert trace.counts["rows_outside_window"] == 10


def test_loading_needs_neither_pandas_nor_pyarrow_nor_torch(repo_root):
    import subprocess
    import sys

    code = (
        "import sys, traces; traces.load(traces.sample_path());"
        "print(sorted({'pandas', 'pyarrow', 'torch', 'scipy'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True
    )
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.shared
def test_reading_the_conversation_trace_takes_a_fraction_of_its_budget(shared_dir):
    import time

    path = shared_dir / "traces" / "AzureLLMInferenceTrace_conv.csv"
    durations = []
    for _ in range(3):
        start = time.process_time()
        traces.load(path)
        durations.append(time.process_time() - start)
    assert min(durations) < 0.15  # measured: 0.02


def test_columns_are_int64(tmp_path):
    trace = read(tmp_path, AZURE + "2023-11-16 18:15:46,374,44\n")
    for column in (trace.arrival_ns, trace.prompt_tokens, trace.output_tokens):
        assert column.dtype == np.int64
