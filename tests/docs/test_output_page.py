"""docs/output.md names every key and column of real output, and none that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim import Result, Scenario, simulate
from sim.cost.hardware import gpu
from sim.cost.profile import Entry, for_gpu, save
from sim.output import with_wall_time
from sim.seeds import Replication
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "output.md").read_text(encoding="utf-8")
SMALL = "poisson:rate=6,n=40,prompt=lognormal(300,900),output=lognormal(30,90)"


def documented(section: str) -> set[str]:
    """Names in the first column of the tables under a heading of the second level."""
    text = re.split(rf"^## {re.escape(section)}$", PAGE, flags=re.MULTILINE)[1]
    text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))


def documented_keys() -> set[str]:
    names = documented("JSON")
    latencies = {name for name in names if "." not in name and name.endswith("_s")}
    plain = {name for name in names if "." in name and "<latency>" not in name}
    inner = {name for name in names if "<latency>" in name}
    return plain | {name.replace("<latency>", of) for name in inner for of in latencies}


def keys(tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in tree.items():
        here = f"{path}{name}"
        if isinstance(value, Mapping):
            yield from keys(value, f"{here}.") if value else iter([f"{here}.*"])
        else:
            yield here


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Runs that show every key between them: with an SLO, rejections, aborts, unfinished requests,
    optional columns, and a profile fitted on a server's logs."""
    folder = tmp_path_factory.mktemp("output")
    trace = folder / "t.csv"
    trace.write_text(
        "t,p,o,who,visit,rank\n0,100,5,ann,a,1\n0.5,9000,5,bob,b,0\n1,50,900,bob,b,0\n"
    )
    named = "arrival=t,prompt=p,output=o,tenant=who,session=visit,priority=rank"
    columns = dict(pair.split("=") for pair in named.split(","))
    shipped = for_gpu(gpu("a100-80g"))
    fit = {"scales": {"attention": 1.1}, "host": {"launch_us": 5.0}, "frontend": {"name": "http"}}
    server = Entry("server", {}, fit, provenance="a test")
    profile: Path = folder / "server.json"
    save(replace(shipped, entries=(*shipped.entries, server)), profile)
    base = Scenario.of(generate=SMALL)
    drafts = {
        "engine.num_speculative_tokens": 2,
        "engine.spec_method": "draft_model",
        "engine.spec_model": "llama-3.2-1b",
    }
    return [
        simulate(base.with_({"slo.ttft_s": 1.0, "policy": "static"})),
        simulate(base.with_({"client.timeout_s": 0.5, "horizon_s": 4.0})),
        simulate(trace={"path": str(trace), "columns": columns}),
        simulate(base.with_({"cost.profile": str(profile)})),
        simulate(base.with_({"limit": 5, **drafts})),
    ]


def test_page_names_exactly_the_keys_of_the_document(results: list[Result]) -> None:
    wild = {name.removesuffix("*") for name in documented_keys() if name.endswith(".*")}
    found = set()
    for result in results:
        for key in keys(with_wall_time(result)):
            found.add(next((f"{w}*" for w in wild if key.startswith(w)), key))
    assert found == documented_keys()


def test_page_names_exactly_what_several_seeds_give(results: list[Result]) -> None:
    replication = Replication.of(results[0].scenario, "2")
    document = replication.combine([with_wall_time(results[0]), with_wall_time(results[0])])
    assert set(document) == {n for n in documented("JSON") if "." not in n and n[-2:] != "_s"}
    text = PAGE.split("### Several policies, several seeds")[1].split("## requests.parquet")[0]
    for part in (document["seeds"], document["metrics"]["ttft_s.p99"]):
        assert all(f"`{name}`" in text for name in part)


def test_page_names_exactly_the_columns_of_the_tables(results: list[Result]) -> None:
    assert {c for r in results for c in r.requests.columns} == documented("requests.parquet")
    assert {c for r in results for c in r.steps.columns} == documented("steps.parquet")


def test_order_of_columns_is_the_page_s(results: list[Result]) -> None:
    for name, columns in (("requests", results[2].requests), ("steps", results[2].steps)):
        listed = re.findall(r"^\| `([^`]+)` \|", PAGE.split(f"## {name}.parquet")[1], re.MULTILINE)
        assert listed[: len(columns.columns)] == list(columns.columns)


def test_slo_attainment_counts_the_rejected_as_misses(results: list[Result]) -> None:
    """As the page says, and turned_away_fraction leaves out what no engine could serve."""
    trace = results[2].scenario.trace
    assert trace is not None
    summary = simulate(results[2].scenario.with_({"slo.ttft_s": 100.0})).summary
    assert summary["requests"]["rejected_by_reason"] == {"context": 1}
    assert summary["goodput"]["slo_attainment"] == 2 / 3
    assert summary["stability"]["turned_away_fraction"] == 0
