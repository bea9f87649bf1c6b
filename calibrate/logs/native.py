"""Results of load generators, as they save them: which tool wrote a JSON file is told by its keys.

Field names were read in the tools' public sources:

* vLLM, `vllm/benchmarks/serve.py` at 009e6d4; older versions save a part of it (no `start_times`,
  `latencies`, `queue_times`), which is enough where nothing else is needed.
* GuideLLM, `schemas/base/request_stats.py` at 31c74ea, `schemas/base/info.py` at 1053a03,
  `benchmark/schemas/base.py` at 14ffe9c (`config.strategy`, `info.timings`); `benchmark/objects.py`
  at 8fe4e2e (`scheduler.strategy`, `scheduler_info.request_timings`); `benchmark/benchmark.py` at
  00a210d (`args.strategy`, times beside the lengths).
* inference-perf, `reportgen/base.py` at 010d12f and `apis/base.py` at 03e89d4
  (`info.response_metrics`); older versions have the same numbers in `info` itself.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.logs.columns import requests_of
from calibrate.logs.records import FloatArray, IntArray, Requests
from sim.errors import UserError
from sim.files import read_bytes
from traces.source import BLANK

Json = Mapping[str, Any]


def read_native(path: str, output_tokens: int | None = None) -> list[Requests] | None:
    """The runs in a load generator's result; None for a file that none of them wrote.
    `output_tokens` is what every request generated, whatever the client counted. UserError for a
    result without what is needed, with the option that saves it."""
    raw = read_bytes(path)
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error):
            return None  # the reader of tables says what is wrong
    if raw.lstrip(BLANK)[:1] not in (b"{", b"["):
        return None
    found: list[Requests] = []
    name = Path(path).name
    try:
        for document in _documents(raw):
            reader = _reader(document, path)
            if reader is None:
                return None
            found += reader(document, name, output_tokens)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        kind = type(error).__name__
        raise UserError(
            f"{path}: a result whose fields are not as expected ({kind}: {error}); make a table of "
            f"its requests and name its columns with --columns"
        ) from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return found


def _documents(raw: bytes) -> Iterator[Any]:
    """One JSON document after the other, as `vllm bench serve --append-result` writes them."""
    text = raw.lstrip(BLANK).decode("utf-8", errors="replace")
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            document, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UserError(f"is not valid JSON ({error}); was it cut off?") from None
        yield document
        while at < len(text) and text[at].isspace():
            at += 1


Reader = Callable[[Any, str, int | None], list[Requests]]


def _reader(document: Any, path: str) -> Reader | None:
    if isinstance(document, list):
        first = document[0] if document else None
        if isinstance(first, dict) and {"start_time", "end_time", "info"} <= first.keys():
            return inference_perf
        raise UserError(
            "is a JSON array, but not inference-perf's per_request_lifecycle_metrics.json; for a "
            "table write one object a line (jq -c '.[]' makes them) and give --columns"
        )
    if not isinstance(document, dict):
        return None
    if {"ttfts", "input_lens", "output_lens"} <= document.keys():
        return vllm_bench
    if "mean_ttft_ms" in document or "request_throughput" in document:
        raise UserError(
            "is a vllm bench result without its requests; run it with --save-result --save-detailed"
        )
    if isinstance(document.get("benchmarks"), list):
        return guidellm
    if "load_summary" in document or "successes" in document:
        raise UserError(
            "is a summary of inference-perf; give per_request_lifecycle_metrics.json, which it "
            "writes with report.request_lifecycle.per_request: true"
        )
    return None


# vllm bench serve.


def vllm_bench(result: Json, name: str, fixed: int | None = None) -> list[Requests]:
    """`vllm bench serve --save-result --save-detailed`: equally long lists, seconds."""
    prompt, output = _ints(result["input_lens"]), _ints(result["output_lens"])
    ttft = _floats(result["ttfts"])
    if not len(prompt) == len(output) == len(ttft):
        raise UserError("input_lens, output_lens and ttfts are not equally long")
    errors = result.get("errors") or [""] * len(prompt)
    good = np.array([not e for e in errors]) & (ttft > 0)
    output = _output(output, fixed)
    if "latencies" in result:
        e2e = _floats(result["latencies"])
    else:
        e2e = ttft + np.array([math.fsum(gaps) for gaps in result["itls"]])
    limit, rate = result.get("max_concurrency"), result.get("request_rate")
    notes = ["prompts taken as all different (the result does not say)"]
    if "start_times" in result:
        sent = _floats(result["start_times"])
    elif rate in ("inf", None, math.inf):
        sent = np.zeros(len(prompt))
        notes.append("no start_times: all requests taken as sent at once")
    else:
        raise UserError("has no start_times (an older vLLM): when requests were sent is unknown")
    slots = None if limit is None else int(limit)
    if slots is not None and "start_times" in result and _peak(sent[good], e2e[good]) < slots:
        slots = None  # never reached: an open loop
    if slots is not None:
        if "queue_times" in result:
            sent = sent - _floats(result["queue_times"])
        elif rate in ("inf", None, math.inf):
            sent = _first_slots(sent, slots)
    return [
        _kept(name, "vllm bench serve", good, sent, prompt, output, ttft, e2e, None, slots, notes)
    ]


# GuideLLM.


def guidellm(report: Json, name: str, fixed: int | None = None) -> list[Requests]:
    """GuideLLM's benchmarks.json: one run per benchmark, requests grouped by status."""
    found = []
    for number, benchmark in enumerate(report["benchmarks"]):
        groups = benchmark["requests"]
        rows = list(groups["successful"])
        others = sum(len(groups.get(s) or []) for s in ("errored", "incomplete"))
        _check_complete(benchmark, len(rows))
        if not rows:
            raise UserError(f"benchmark {number} has no successful request")
        times = [_guidellm_times(row) for row in rows]
        start, first, last = (np.array([t[i] for t in times]) for i in range(3))
        prompt = _ints([_tokens(row, "prompt_tokens", "input_metrics") for row in rows])
        output = _ints([_tokens(row, "output_tokens", "output_metrics") for row in rows])
        slots = _guidellm_slots(benchmark)
        notes = []
        if others:
            notes.append(f"{others} errored or incomplete requests left out of the load too")
        good = np.ones(len(rows), dtype=np.bool_)
        output = _output(output, fixed)
        found.append(
            _kept(
                f"{name}[{number}]" if len(report["benchmarks"]) > 1 else name,
                "guidellm",
                good,
                start if slots is None else _first_slots(start, slots),
                prompt,
                output,
                first - start,
                last - start,
                [_arguments(row) for row in rows],
                slots,
                notes,
                failed=others,
            )
        )
    return found


def _check_complete(benchmark: Json, kept: int) -> None:
    totals = benchmark.get("request_totals") or benchmark.get("metrics", {}).get("request_totals")
    made = (totals or {}).get("successful", kept)
    if made > kept:
        raise UserError(
            f"holds {kept} of {made} successful requests (sampled): the load is not known; save "
            f"all of them"
        )


def _guidellm_times(row: Json) -> tuple[float, float, float]:
    """(start, first token, last token); NaN for tokens without a time."""
    timings = (row.get("info") or {}).get("timings")
    if timings is None:
        timings = (row.get("scheduler_info") or {}).get("request_timings")
    if timings is None:
        timings = row  # 0.2
    start = _one_of(timings, "request_start", "start_time")
    first = _one_of(timings, "first_token_iteration", "first_iteration", "first_token_time")
    last = _one_of(timings, "last_token_iteration", "last_iteration", "last_token_time")
    if last is None:
        last = _one_of(timings, "request_end", "end_time")
    if start is None:
        raise KeyError("request_start")
    return float(start), math.nan if first is None else float(first), float(last or math.nan)


def _one_of(fields: Json, *names: str) -> Any:
    return next((fields[n] for n in names if fields.get(n) is not None), None)


def _tokens(row: Json, name: str, metrics: str) -> int:
    found = row.get(name)
    if found is None:
        usage = row.get(metrics) or {}
        found = _one_of(usage, "total_tokens", "text_tokens")
    return int(found or 0)


def _arguments(row: Json) -> str:
    """What a request was sent with, as text: equal texts are equal prompts."""
    given = row.get("prompt") or row.get("request_args")
    return given if isinstance(given, str) else json.dumps(given, sort_keys=True) if given else ""


def _guidellm_slots(benchmark: Json) -> int | None:
    """Streams of a closed loop: the strategies synchronous, concurrent and throughput."""
    holders = (benchmark.get(n) for n in ("config", "scheduler", "args"))
    strategy: Json = next((h["strategy"] for h in holders if h and "strategy" in h), {})
    kind = strategy.get("type_") or strategy.get("kind")
    if kind == "synchronous":
        return 1
    if kind in ("concurrent", "throughput"):
        streams = _one_of(strategy, "streams", "max_concurrency")
        return None if streams is None else int(streams)
    return None


# inference-perf.


def inference_perf(rows: Sequence[Json], name: str, fixed: int | None = None) -> list[Requests]:
    """inference-perf's per_request_lifecycle_metrics.json: one object per request, seconds."""
    good = np.array([row.get("error") is None and bool(row.get("info")) for row in rows])
    start = _floats([row["start_time"] for row in rows])
    e2e = _floats([row["end_time"] for row in rows]) - start
    prompt = np.zeros(len(rows), dtype=np.int64)
    output = np.zeros(len(rows), dtype=np.int64)
    ttft = np.full(len(rows), np.nan)
    texts = []
    counted = 0
    for i, row in enumerate(rows):
        texts.append(row.get("request") or "")
        if not good[i]:
            continue
        info = row["info"]
        response = info.get("response_metrics") or info
        prompt[i] = info.get("input_tokens") or info["request_metrics"]["text"]["input_tokens"]
        served = _one_of(response.get("server_usage") or {}, "completion_tokens", "output_tokens")
        counted += served is None
        output[i] = served if served is not None else response.get("output_tokens") or 0
        if response.get("output_token_times"):
            ttft[i] = response["output_token_times"][0] - start[i]
    notes = []
    if counted and fixed is None:
        notes.append(
            f"output lengths of {counted} requests are the client's count of the text's tokens; "
            f"where ignore_eos fixed them, give --output-tokens"
        )
    output = _output(output, fixed)
    return [
        _kept(name, "inference-perf", good, start, prompt, output, ttft, e2e, texts, None, notes)
    ]


# All of them.


def _kept(
    name: str,
    format: str,
    good: np.ndarray,
    sent_s: FloatArray,
    prompt: IntArray,
    output: IntArray,
    ttft: FloatArray,
    e2e: FloatArray,
    content: Sequence[str] | None,
    slots: int | None,
    notes: list[str],
    failed: int = 0,
) -> Requests:
    good = good & (output > 0) & (prompt > 0)
    if not good.any():
        raise UserError(f"none of its {len(good)} requests succeeded")
    out = int((~good).sum())
    if out:
        notes = [*notes, f"{out} failed requests left out of the load too"]
    sent_ns = np.round((sent_s - sent_s.min()) * 1e9).astype(np.int64)
    return requests_of(
        name,
        format,
        sent_ns[good],
        prompt[good],
        output[good],
        ttft_s=ttft[good],
        e2e_s=e2e[good],
        content=None if content is None else [c for c, g in zip(content, good, strict=True) if g],
        max_in_flight=slots,
        counts={"rows": len(good) + failed, "failed": out + failed},
        notes=notes,
    )


def _output(counted: IntArray, fixed: int | None) -> IntArray:
    return counted if fixed is None else np.full(len(counted), fixed, dtype=np.int64)


def _peak(sent: FloatArray, e2e: FloatArray) -> int:
    """Most requests in flight at a time."""
    times = np.concatenate((sent, sent + e2e))
    change = np.concatenate((np.ones(len(sent)), -np.ones(len(sent))))
    order = np.lexsort((change, times))  # who leaves at an instant goes before who comes
    return int(np.cumsum(change[order]).max(initial=0))


def _first_slots(sent: FloatArray, slots: int) -> FloatArray:
    """When a closed loop wanted to send: the first of each slot as recorded, all others as soon as
    a slot is free. The order stays."""
    order = np.argsort(sent, kind="stable")
    wanted = np.minimum(sent, sent[order][min(slots, len(sent)) - 1])
    return np.asarray(wanted, dtype=np.float64)


def _ints(values: Sequence[Any]) -> IntArray:
    return np.array([0 if v is None else int(v) for v in values], dtype=np.int64)


def _floats(values: Sequence[Any]) -> FloatArray:
    return np.array([math.nan if v is None else float(v) for v in values], dtype=np.float64)
