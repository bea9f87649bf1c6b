"""Logs of every kind that is read, and what is said of those that cannot be."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from calibrate.logs.read import read_logs
from calibrate.logs.records import Requests, Steps
from sim.errors import UserError
from tests.calibrate import logs

N = 40


def table(n: int = N) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    output = rng.integers(1, 200, n)
    output[3] = 1
    ttft = rng.uniform(0.05, 0.3, n)
    tpot = np.where(output > 1, rng.uniform(0.01, 0.02, n), np.nan)
    e2e = ttft + np.nan_to_num(tpot) * (output - 1)
    return pd.DataFrame(
        {
            "arrival_s": np.sort(rng.uniform(0, 20, n)),
            "prompt_tokens": rng.integers(1, 4000, n),
            "output_tokens": output,
            "ttft_s": ttft,
            "tpot_s": tpot,
            "e2e_s": e2e,
        }
    )


def requests(path: Path, columns: str | None = None, **options: Any) -> Requests:
    (found,) = read_logs([str(path)], columns, **options)
    assert isinstance(found, Requests)
    return found


def check(found: Requests, expected: pd.DataFrame) -> None:
    first = expected.arrival_s.min()
    np.testing.assert_allclose(found.sent_s, expected.arrival_s - first, atol=2e-6)
    assert found.prompt_tokens.tolist() == expected.prompt_tokens.tolist()
    assert found.output_tokens.tolist() == expected.output_tokens.tolist()
    for name in ("ttft", "tpot", "e2e"):
        np.testing.assert_allclose(found.latency(name), expected[f"{name}_s"], atol=2e-6)


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    frame.to_csv(path, index=False)


def write_gzip(frame: pd.DataFrame, path: Path) -> None:
    path.write_bytes(gzip.compress(frame.to_csv(index=False).encode()))


def write_lines(frame: pd.DataFrame, path: Path) -> None:
    frame.to_json(path, orient="records", lines=True, double_precision=15)


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    frame.to_parquet(path)


@pytest.mark.parametrize("write", [write_csv, write_gzip, write_lines, write_parquet])
def test_named_columns_of_any_container(
    write: Callable[[pd.DataFrame, Path], None], tmp_path: Path
) -> None:
    path, frame = tmp_path / "log", table()
    write(frame, path)
    check(requests(path, logs.REQUESTS), frame)


def test_times_in_other_units_and_on_an_absolute_clock(tmp_path: Path) -> None:
    frame = table()
    other = pd.DataFrame(
        {
            "sent": (1e3 * frame.arrival_s).round(6),
            "first": 1e3 * (frame.arrival_s + frame.ttft_s),
            "e2e_us": 1e6 * frame.e2e_s,
            "p": frame.prompt_tokens,
            "o": frame.output_tokens,
        }
    )
    other.to_csv(tmp_path / "log.csv", index=False)
    columns = "arrival_ms=sent,first_token_ms=first,e2e_us=e2e_us,prompt=p,output=o"
    check(requests(tmp_path / "log.csv", columns), frame)


def test_dates_are_arrivals_too(tmp_path: Path) -> None:
    frame = table()
    dated = frame.assign(
        sent=pd.Timestamp("2026-11-30 23:59:50")
        + pd.to_timedelta((frame.arrival_s * 1e9).round(), unit="ns")
    )
    columns = logs.REQUESTS.replace("arrival_s", "sent")
    for name, write in (("a.csv", write_csv), ("a.parquet", write_parquet)):
        write(dated, tmp_path / name)
        check(requests(tmp_path / name, columns), frame)


def test_rows_out_of_order_are_sorted_with_their_latencies(tmp_path: Path) -> None:
    frame = table()
    write_csv(frame.iloc[::-1], tmp_path / "log.csv")
    check(requests(tmp_path / "log.csv", logs.REQUESTS), frame)


def test_failed_rows_are_counted_and_told(tmp_path: Path) -> None:
    frame = table().assign(ok="completed")
    frame.loc[5, "ok"] = "aborted"
    write_csv(frame, tmp_path / "log.csv")
    found = requests(tmp_path / "log.csv", logs.REQUESTS + ",ok=ok")
    check(found, frame.drop(5))
    assert found.counts == {"rows": N, "failed": 1, "skipped": 0}
    assert "1 failed requests left out of the load too" in found.notes


def test_prompts_of_equal_id_are_equal(tmp_path: Path) -> None:
    frame = table().assign(which=[i % 7 for i in range(N)])
    write_csv(frame, tmp_path / "log.csv")
    content = requests(tmp_path / "log.csv", logs.REQUESTS + ",prompt_id=which").content
    assert content is not None
    assert content.tolist() == [i % 7 for i in range(N)]


def test_output_length_may_be_given_instead(tmp_path: Path) -> None:
    frame = table().assign(output_tokens=0)  # as a client counts a text it cannot tokenise
    write_csv(frame, tmp_path / "log.csv")
    found = requests(tmp_path / "log.csv", logs.REQUESTS, output_tokens=50)
    assert set(found.output_tokens.tolist()) == {50}
    np.testing.assert_allclose(found.tpot_s, (frame.e2e_s - frame.ttft_s) / 49, atol=1e-6)


def steps_frame() -> pd.DataFrame:
    rng = np.random.default_rng(2)
    decodes = rng.integers(0, 30, N)
    chunk = np.where(rng.random(N) < 0.5, rng.integers(2, 500, N), 0)
    decodes[chunk == 0] += 1
    return pd.DataFrame(
        {
            "ms": rng.uniform(5, 50, N),
            "batch": decodes,
            "kv": decodes * rng.integers(10, 900, N),
            "new": chunk,
        }
    )


def test_steps_from_named_columns_say_what_they_assume(tmp_path: Path) -> None:
    frame = steps_frame()
    frame.to_csv(tmp_path / "steps.csv", index=False)
    columns = "duration_ms=ms,decodes=batch,context=kv,prefill_tokens=new"
    (found,) = read_logs([str(tmp_path / "steps.csv")], columns)
    assert isinstance(found, Steps)
    np.testing.assert_allclose(found.duration_s, frame.ms / 1e3)
    assert found.shapes.num_decodes.tolist() == frame.batch.tolist()
    assert found.shapes.num_tokens.tolist() == (frame.batch + frame.new).tolist()
    assert found.shapes.chunk_tokens.tolist() == frame.new[frame.new > 0].tolist()
    assert found.shapes.num_sampled.tolist() == (frame.batch + (frame.new > 0)).tolist()
    assert len(found.notes) == 4
    assert "equally long" in found.notes[0]


def test_chunks_of_a_step_may_be_listed(tmp_path: Path) -> None:
    frame = steps_frame()
    lines = [
        {"s": m / 1e3, "d": int(b), "c": int(k), "chunks": [[7, 100], [3, 0]] if n else []}
        for m, b, k, n in frame.itertuples(index=False)
    ]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    (found,) = read_logs([str(path)], "duration=s,decodes=d,context=c,chunks=chunks")
    assert isinstance(found, Steps)
    pairs = zip(found.shapes.chunk_tokens, found.shapes.chunk_prefix, strict=True)
    assert set(pairs) == {(7, 100), (3, 0)}


def save(document: Any, path: Path) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_vllm_bench_result(tmp_path: Path) -> None:
    frame = table()
    found = requests(save(logs.vllm_bench(frame), tmp_path / "r.json"))
    check(found, frame)
    assert found.format == "vllm bench serve"
    assert found.max_in_flight is None


def test_vllm_bench_appended_results_are_runs_of_their_own(tmp_path: Path) -> None:
    document = json.dumps(logs.vllm_bench(table()))
    path = tmp_path / "r.json.gz"
    path.write_bytes(gzip.compress(f"{document}\n{document}".encode()))
    assert [len(run) for run in read_logs([str(path)])] == [N, N]


def test_vllm_bench_of_an_older_version_at_once(tmp_path: Path) -> None:
    document = logs.vllm_bench(table(), request_rate="inf", max_concurrency=8)
    del document["start_times"], document["latencies"]
    found = requests(save(document, tmp_path / "r.json"))
    np.testing.assert_allclose(found.e2e_s, table().e2e_s, atol=1e-6)
    assert found.max_in_flight == 8
    assert not found.sent_s.any()


def test_vllm_bench_limit_that_was_never_reached_is_an_open_loop(tmp_path: Path) -> None:
    document = logs.vllm_bench(table(), max_concurrency=N)
    assert requests(save(document, tmp_path / "r.json")).max_in_flight is None


def test_vllm_bench_failures_are_counted(tmp_path: Path) -> None:
    document = logs.vllm_bench(table())
    document["errors"][2] = "timeout"
    document["ttfts"][2], document["output_lens"][2] = 0.0, 0
    found = requests(save(document, tmp_path / "r.json"))
    check(found, table().drop(2))
    assert found.counts["failed"] == 1


def test_guidellm_report(tmp_path: Path) -> None:
    frame = table()
    found = requests(save(logs.guidellm(frame), tmp_path / "b.json"))
    check(found, frame)
    assert found.format == "guidellm"
    assert found.max_in_flight is None


def test_guidellm_streams_are_a_closed_loop(tmp_path: Path) -> None:
    document = logs.guidellm(table(), {"type_": "concurrent", "streams": 4})
    found = requests(save(document, tmp_path / "b.json"))
    assert found.max_in_flight == 4
    first = table().arrival_s - table().arrival_s.min()
    np.testing.assert_allclose(found.sent_s[:4], first[:4], atol=2e-6)
    assert set(found.sent_s[4:].tolist()) == {found.sent_s[3]}


def test_guidellm_reports_of_older_versions(tmp_path: Path) -> None:
    frame = table()
    middle, oldest = logs.guidellm(frame), logs.guidellm(frame)
    for row in middle["benchmarks"][0]["requests"]["successful"]:
        times = row.pop("info")["timings"]
        for name in ("first", "last"):
            times[f"{name}_iteration"] = times.pop(f"{name}_token_iteration")
        row["scheduler_info"] = {"request_timings": times}
    for row in oldest["benchmarks"][0]["requests"]["successful"]:
        times = row.pop("info")["timings"]
        row["start_time"] = times["request_start"]
        row["first_token_time"] = times["first_token_iteration"]
        row["last_token_time"] = times["last_token_iteration"]
    for name, document in (("middle", middle), ("oldest", oldest)):
        check(requests(save(document, tmp_path / f"{name}.json")), frame)


def test_inference_perf_report(tmp_path: Path) -> None:
    frame = table()
    found = requests(save(logs.inference_perf(frame), tmp_path / "p.json"))
    check(found, frame)
    assert found.format == "inference-perf"
    assert found.content is not None
    assert not found.notes


def test_inference_perf_counting_by_itself_is_told(tmp_path: Path) -> None:
    frame = table()
    path = save(logs.inference_perf(frame, usage=False), tmp_path / "p.json")
    found = requests(path)
    assert found.output_tokens.tolist() == (frame.output_tokens + 1).tolist()
    assert "client's count" in found.notes[0]
    assert set(requests(path, output_tokens=9).output_tokens.tolist()) == {9}


def without(document: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in document.items() if k not in names}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (without(logs.vllm_bench(table()), "ttfts", "input_lens"), "--save-detailed"),
        (without(logs.vllm_bench(table()), "start_times"), "no start_times"),
        (logs.vllm_bench(table(), input_lens=[1]), "not equally long"),
        (logs.vllm_bench(table(), errors=["x"] * N), "none of its 40 requests succeeded"),
        ({"load_summary": {}}, "per_request_lifecycle_metrics.json"),
        ([{"a": 1}], "is a JSON array"),
        ({"benchmarks": [{"requests": {"successful": [{"info": 3}]}}]}, "not as expected"),
        ({"a": 1}, "not a result of vllm bench serve"),
    ],
)
def test_results_that_cannot_be_used(document: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        read_logs([str(save(document, tmp_path / "r.json"))])
    assert "r.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sampled_guidellm_report_is_refused(tmp_path: Path) -> None:
    document = logs.guidellm(table())
    document["benchmarks"][0]["metrics"]["request_totals"]["successful"] = 1000
    with pytest.raises(UserError, match="holds 40 of 1000"):
        read_logs([str(save(document, tmp_path / "b.json"))])


def test_a_result_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(logs.vllm_bench(table()))[:-50])
    with pytest.raises(UserError, match="not valid JSON"):
        read_logs([str(path)])


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("arrival=arrival_s", "prompt=COLUMN is missing"),
        ("arival=arrival_s", "unknown column role 'arival'; did you mean 'arrival'"),
        ("arrival", "not of the form role=column"),
        ("arrival=a,arrival_ms=b", "arrival is named twice"),
        ("ttft=first_ms", "write ttft_ms=first_ms"),
        ("arrival=arrival_s,prompt=prompt_tokens,output=output_tokens", "no latency named"),
        (logs.REQUESTS + ",first_token=x", "ttft and first_token say the same"),
        (logs.REQUESTS.replace("ttft_s", "ttfft"), "unknown column 'ttfft'; did you mean"),
        (logs.REQUESTS + ",decodes=x", "decodes belongs to steps"),
        ("duration=e2e_s,decodes=output_tokens", "context=COLUMN is missing"),
        ("duration=e2e_s,start=x,decodes=y", "not both"),
        ("start=arrival_s,decodes=y", "both needed"),
        ("duration=e2e_s", "decodes=COLUMN or prefill_tokens=COLUMN"),
    ],
)
def test_columns_that_cannot_be(columns: str, said: str, tmp_path: Path) -> None:
    write_csv(table(), tmp_path / "log.csv")
    with pytest.raises(UserError, match=said) as caught:
        read_logs([str(tmp_path / "log.csv")], columns)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("prompt_tokens", "x", "line 6: prompt"),
        ("prompt_tokens", 0, "at least one token"),
        ("ttft_s", -1, "no duration"),
        ("ttft_s", 900, "the last token is before the first"),
        ("arrival_s", "", "arrival_s\\) is empty"),
        ("output_tokens", 2.5, "not a whole number"),
    ],
)
def test_bad_cells_name_their_line(column: str, value: Any, said: str, tmp_path: Path) -> None:
    frame = table().astype(object)
    frame.loc[4, column] = value
    path = tmp_path / "log.csv"
    write_csv(frame, path)
    with pytest.raises(UserError, match=said) as caught:
        read_logs([str(path)], logs.REQUESTS)
    assert "line 6" in str(caught.value)
    found = requests(path, logs.REQUESTS, skip_bad_rows=True)
    assert (len(found), found.counts["skipped"]) == (N - 1, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv": 3, "batch": 5}, "context is 3 tokens for 5 decodes"),
        ({"ms": 0}, "lasts 0 s"),
        ({"ms": -2}, "no duration"),
        ({"batch": -1}, "less than 0"),
    ],
)
def test_steps_that_cannot_be(changes: dict[str, int], said: str, tmp_path: Path) -> None:
    frame = steps_frame().astype(object)
    for name, value in changes.items():
        frame.loc[9, name] = value
    frame.to_csv(tmp_path / "s.csv", index=False)
    with pytest.raises(UserError, match=said):
        read_logs(
            [str(tmp_path / "s.csv")], "duration_ms=ms,decodes=batch,context=kv,prefill_tokens=new"
        )


def test_too_few_records_are_refused(tmp_path: Path) -> None:
    write_csv(table(7), tmp_path / "log.csv")
    with pytest.raises(UserError, match="7 records are too few"):
        read_logs([str(tmp_path / "log.csv")], logs.REQUESTS)
