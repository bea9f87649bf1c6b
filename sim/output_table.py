"""What a run says to a person: aligned text, in colour where the output is a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from sim.format import count, duration, percent, rate
from sim.scenario import SLO, Scenario

LATENCIES = (
    ("TTFT", "ttft_s"),
    ("TPOT", "tpot_s"),
    ("ITL", "itl_s"),
    ("E2E", "e2e_s"),
    ("queue", "queue_s"),
)
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
LABEL = 12
Row = tuple[str, Sequence[str]]
"""A name and a cell for each column."""
COLOURS = {"stable": "32", "near-capacity": "33", "unstable": "31"}


class Style:
    """ANSI emphasis, or none."""

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def paint(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.colour and code else text

    def label(self, text: str) -> str:
        return self.paint(f"{text:<{LABEL}}", "2")


def render(summary: Mapping[str, Any], scenario: Scenario, style: Style) -> str:
    """One run."""
    stability = summary["stability"]
    lines = [
        style.paint(title(summary, scenario), "1"),
        style.label("trace") + trace_line(summary),
        style.label("requests") + _requests(summary["requests"]),
        "",
        style.label("") + "".join(f"{name:>10}" for name in COLUMNS),
    ]
    for name, key in LATENCIES:
        cells = [duration(summary[key][column]) for column in COLUMNS]
        lines.append(style.label(name) + "".join(f"{cell:>10}" for cell in cells))
    lines += [
        "",
        style.label("throughput") + _throughput(summary["throughput"]),
        style.label("goodput") + _goodput(summary["goodput"], scenario.slo),
        style.label("stability")
        + style.paint(stability["verdict"], COLOURS[stability["verdict"]])
        + f": {stability['sentence']}",
        style.label("time") + _time(summary["time"]),
        style.label("KV cache") + _kv(summary["kv"]),
        style.label("KV waste") + _waste(summary["kv"]["waste"]),
        style.label("cost model") + _cost_model(summary["cost_model"]),
    ]
    return "\n".join(line for line in lines if line is not None)


def render_comparison(
    summaries: Mapping[str, Mapping[str, Any]], scenario: Scenario, style: Style
) -> str:
    """Several policies on the same requests, a column each."""
    first = next(iter(summaries.values()))
    verdicts = [s["stability"]["verdict"] for s in summaries.values()]
    rows = [("stability", verdicts)]
    rows += [(name, [show(at(s, path)) for s in summaries.values()]) for name, path, show in ROWS]
    return "\n".join(
        [
            style.paint(title(first, scenario, policy=False), "1"),
            style.label("trace") + trace_line(first, simulated=False),
            "",
            *columns(list(summaries), rows, style),
        ]
    )


def columns(heads: Sequence[str], rows: Sequence[Row], style: Style) -> list[str]:
    """Lines of a table with a column per head; verdicts in it have their colour."""
    cells = [*heads, *(cell for _, row in rows for cell in row)]
    width = max(14, 2 + max(len(cell) for cell in cells))

    def line(name: str, row: Sequence[str]) -> str:
        shown = (style.paint(f"{c:>{width}}", COLOURS.get(c, "")) for c in row)
        return style.paint(f"{name:<24}", "2") + "".join(shown)

    return [line("", heads), *(line(name, row) for name, row in rows)]


def at(summary: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path."""
    value: Any = summary
    for name in path.split("."):
        value = value[name]
    return value


ROWS = (
    ("load of capacity", "stability.utilisation", percent),
    ("capacity, requests/s", "stability.capacity_requests_per_s", rate),
    ("completed", "requests.completed", count),
    ("rejected", "requests.rejected", count),
    ("TTFT mean", "ttft_s.mean", duration),
    ("TTFT p50", "ttft_s.p50", duration),
    ("TTFT p99", "ttft_s.p99", duration),
    ("TPOT mean", "tpot_s.mean", duration),
    ("TPOT p99", "tpot_s.p99", duration),
    ("ITL p99", "itl_s.p99", duration),
    ("E2E mean", "e2e_s.mean", duration),
    ("E2E p99", "e2e_s.p99", duration),
    ("requests/s", "throughput.requests_per_s", rate),
    ("output tokens/s", "throughput.output_tokens_per_s", rate),
    ("goodput, requests/s", "goodput.requests_per_s", rate),
    ("SLO attainment", "goodput.slo_attainment", percent),
    ("running, mean", "kv.mean_running", rate),
    ("KV usage, peak", "kv.peak_usage", percent),
    ("KV waste, total", "kv.waste.total", percent),
    ("  internal", "kv.waste.internal_fragmentation", percent),
    ("  reserved, unused", "kv.waste.reserved_unused", percent),
    ("  external", "kv.waste.external_fragmentation", percent),
    ("preemptions", "kv.preemptions", count),
    ("prefix hits", "kv.prefix_hit_rate", percent),
)


def title(summary: Mapping[str, Any], scenario: Scenario, policy: bool = True) -> str:
    """What was simulated, in the catalogue's names, whatever aliases the user wrote."""
    model, gpu = summary["run"]["model"], summary["run"]["gpu"]
    replicas = scenario.cluster.replicas
    gpus = scenario.engine.get("tensor_parallel_size") or 1
    stages = scenario.engine.get("pipeline_parallel_size") or 1
    where = f"{gpus * stages} x {gpu}" if gpus * stages > 1 else gpu
    if scenario.execute.device is not None:
        where = "the real engine"
    fleet = f"{replicas} replicas of {where}, {scenario.routing.name}" if replicas > 1 else where
    served = f"{model} on {fleet}"
    if not policy:
        return served
    options = ", ".join(f"{k}={v}" for k, v in scenario.policy.options.items())
    return f"{served}: {scenario.policy.name}" + (f" ({options})" if options else "")


def trace_line(summary: Mapping[str, Any], simulated: bool = True) -> str:
    trace = summary["trace"]
    # How many rows were kept is in the number of requests; here is what was done to the others.
    told = {
        k: v
        for k, v in trace["counts"].items()
        if v and k not in ("rows_read", "requests_generated")
    }
    notes = "".join(f"; {k.replace('_', ' ')}: {v:,}" for k, v in told.items())
    if simulated:
        notes = f", {duration(summary['run']['simulated_s'])} simulated{notes}"
    name = trace["name"] if trace["name"].isprintable() else repr(trace["name"])
    number = trace["requests"]
    requests = "1 request" if number == 1 else f"{number:,} requests"
    return f"{name} ({trace['format']}), {requests}{notes}"


def _requests(requests: Mapping[str, Any]) -> str:
    parts = [f"{requests['completed']:,} completed"]
    for name in ("rejected", "aborted", "unfinished"):
        if requests[name]:
            why = ", ".join(f"{k} {v:,}" for k, v in requests[f"{name}_by_reason"].items())
            parts.append(f"{requests[name]:,} {name} ({why})")
        else:
            parts.append(f"0 {name}")
    if requests["not_arrived"]:
        parts.append(f"{requests['not_arrived']:,} not arrived yet")
    if requests["truncated"]:
        parts.append(f"{requests['truncated']:,} cut at the context limit")
    if requests["warm_up_s"]:
        parts.append(
            f"{requests['measured']:,} measured, after {duration(requests['warm_up_s'])} of warm-up"
        )
    return ", ".join(parts)


def _throughput(t: Mapping[str, Any]) -> str:
    return (
        f"{rate(t['requests_per_s'])} requests/s, "
        f"{rate(t['output_tokens_per_s'])} output tokens/s, "
        f"{rate(t['total_tokens_per_s'])} tokens/s with prompts"
    )


def _goodput(goodput: Mapping[str, Any], slo: SLO) -> str:
    if goodput["slo_attainment"] is None:
        return "no SLO given (--slo ttft=1,tpot=0.05)"
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "E2E": slo.e2e_s}
    told = ", ".join(f"{k} <= {duration(v)}" for k, v in limits.items() if v is not None)
    return (
        f"{rate(goodput['requests_per_s'])} requests/s, "
        f"{percent(goodput['slo_attainment'])} of requests meet {told}"
    )


def _time(parts: Mapping[str, float]) -> str:
    total = sum(parts.values())
    if not total:
        return "-"
    return ", ".join(f"{name} {percent(s / total)}" for name, s in parts.items() if s)


def _kv(kv: Mapping[str, Any]) -> str:
    return (
        f"{kv['num_blocks']:,} blocks of {kv['block_size']} tokens, "
        f"{percent(kv['mean_usage'])} used on average, {percent(kv['peak_usage'])} at most; "
        f"prefix hits {percent(kv['prefix_hit_rate'])}; {kv['preemptions']:,} preemptions"
    )


def _waste(waste: Mapping[str, float]) -> str:
    return (
        f"{percent(waste['total'])} of the memory: internal "
        f"{percent(waste['internal_fragmentation'])}, reserved and unused "
        f"{percent(waste['reserved_unused'])}, external {percent(waste['external_fragmentation'])}"
    )


def _cost_model(cost: Mapping[str, Any]) -> str:
    extrapolated = percent(cost["extrapolated_fraction"])
    head = f"profile {cost['profile']}, {extrapolated} of steps extrapolated"
    source = textwrap.wrap(cost["provenance"], 100, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * LABEL).join([head, *source])
