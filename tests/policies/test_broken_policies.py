"""Users' own policies that are wrong: one line that names the policy, never a crash or a hang."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sim import Scenario, simulate
from sim.errors import UserError

KINDS = {
    "scheduling": ("policy", "SchedulingPolicy"),
    "eviction": ("eviction", "EvictionPolicy"),
    "admission": ("admission", "AdmissionPolicy"),
    "routing": ("routing", "RoutingPolicy"),
}
SHORTAGE = {"num_gpu_blocks": 40, "scheduler_reserve_full_isl": False}
"""Few enough blocks that requests are preempted and blocks evicted."""


def run(folder: Path, kind: str, body: str) -> None:
    field, base = KINDS[kind]
    file = folder / "own.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    file.write_text(f"from sim.protocols import *\n\n\nclass Own({base}):\n{lines}\n")
    simulate(
        Scenario.of(
            generate="poisson:rate=40,n=20,prompt=200,output=20",
            engine=SHORTAGE,
            capacity_probe=False,
            cluster={"replicas": 2 if kind == "routing" else 1},
            **{field: f"{file}:Own"},
        )
    )


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("scheduling", "def __init__(self, a): pass", "cannot be made without arguments"),
        ("scheduling", "order = 'foo'", "unknown value of order .* 'foo'"),
        ("scheduling", "reserve = 3", "unknown value of reserve .* '3'"),
        ("scheduling", "watermark = 2", r"watermark of .* must be in \[0, 1\), got 2"),
        ("scheduling", "watermark = float('nan')", "got nan"),
        ("scheduling", "chunked_prefill = 'yes'", "chunked_prefill of .* must be true or false"),
        ("scheduling", "order = 'key'", "declares order='key': it must define"),
        ("scheduling", "key = 3", "key must be a method, not 3"),
        ("scheduling", "def key(self): return 1", r"is called as key\(request, view\)"),
        ("scheduling", "def plan(self): return None", r"is called as plan\(view\)"),
        ("scheduling", "def prepare(self): pass", r"is called as prepare\(rng\)"),
        ("eviction", "def order(self): return 1", r"is called as order\(block\)"),
        ("routing", "def choose(self, request): return 0", r"as choose\(request, view\)"),
        ("routing", "pass", r"must define choose\(request, view\)"),
        ("admission", "def on_leave(self): pass", r"as on_leave\(request, replica\)"),
    ],
)
def test_what_can_be_told_before_the_run(
    tmp_path: Path, kind: str, body: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path, kind, body)
    assert f"{kind} policy" in str(caught.value)
    assert "own.py:Own" in str(caught.value)


@pytest.mark.parametrize("order", ["key", "key-each-step"])
@pytest.mark.parametrize("value", ["request.request", "float('nan')", "1 if view.now_ns else 'x'"])
def test_keys_that_do_not_compare(tmp_path: Path, order: str, value: str) -> None:
    body = f"order = {order!r}\ndef key(self, request, view): return {value}"
    if "now_ns" in value:
        body = body.replace("view.now_ns", "request.request.uid % 2")
    with pytest.raises(UserError, match=r"key\(\) .* cannot be compared"):
        run(tmp_path, "scheduling", body)


@pytest.mark.parametrize("value", ["block", "float('nan')", "block.depth or 'x'"])
def test_eviction_orders_that_do_not_compare(tmp_path: Path, value: str) -> None:
    with pytest.raises(UserError, match=r"order\(\) .* cannot be compared"):
        run(tmp_path, "eviction", f"def order(self, block): return {value}")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def plan(self, view): return 3", r"plan\(\) gave 3, neither a Plan nor None"),
        ("def plan(self, view): return Plan(3)", "a Plan has lists of requests, not 3"),
        ("def plan(self, view): return Plan([], preempt=3)", "lists of requests, not 3"),
        ("def plan(self, view): return Plan([3])", r"schedules 3, which is not \(request, num"),
        ("def plan(self, view): return Plan([(3, 1)])", "plans 3, which neither waits nor runs"),
        ("def plan(self, view): return Plan([(r, 1.5) for r in view.waiting])", "1.5"),
        ("def plan(self, view): return Plan([(r, 0) for r in view.waiting])", "schedules 0 tokens"),
        ("def plan(self, view): return Plan([])", "plans nothing though requests wait"),
        ("def limits(self, view): return 3", r"limits\(\) gave 3, not Limits"),
        ("def limits(self, view): return Limits(2.5, 3)", "not Limits of two counts"),
        ("def limits(self, view): return Limits(0, 0)", "plans nothing though requests wait"),
        ("def victim(self, view): return 3", "preempts 3, which is not running"),
        ("def displace(self, view): return 3", r"displace\(\) gave 3, not requests"),
        ("def displace(self, view): return view.waiting", "which is not running"),
    ],
)
def test_scheduling_decisions_that_make_no_sense(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path, "scheduling", body)
    assert str(caught.value).startswith("policy Own")


@pytest.mark.parametrize("decision", ["None", "True", "Accept", "Reject(3)", "Reject('')", "0"])
def test_admissions_that_are_no_decision(tmp_path: Path, decision: str) -> None:
    with pytest.raises(UserError, match=r"admission policy Own decided .* it must be Accept"):
        run(tmp_path, "admission", f"def decide(self, request, view): return {decision}")


@pytest.mark.parametrize("until", ["0", "-1", "'x'", "1.5", "view.now_ns", "10**30"])
def test_deferring_until_a_time_that_does_not_come(tmp_path: Path, until: str) -> None:
    with pytest.raises(UserError, match="no whole number or not later than now"):
        run(tmp_path, "admission", f"def decide(self, request, view): return Defer({until})")


@pytest.mark.parametrize("gap_ns", [1, 10**9])
def test_deferring_for_ever_ends(
    tmp_path: Path, gap_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.cluster.cluster.MOST_ASKED", 10_000)
    body = f"def decide(self, request, view): return Defer(view.now_ns + {gap_ns})"
    with pytest.raises(UserError, match="deferred requests 10,000 times in a row"):
        run(tmp_path, "admission", body)


def test_preempting_for_ever_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.engine.rules.MOST_PREEMPTED", 50)
    body = (
        "def plan(self, view):\n"
        "    return Plan([(r, 1) for r in [*view.running, *view.waiting]][:1], view.running)"
    )
    with pytest.raises(UserError, match=r"has preempted .* 50 times"):
        run(tmp_path, "scheduling", body)


@pytest.mark.parametrize("choice", ["-1", "2", "1.0", "'a'", "None", "[0]", "float('nan')"])
def test_replicas_that_are_not_there(tmp_path: Path, choice: str) -> None:
    with pytest.raises(UserError, match="routing policy Own chose replica"):
        run(tmp_path, "routing", f"def choose(self, request, view): return {choice}")


@pytest.mark.parametrize("change", ["view.num_requests[0] = 9", "view.replicas.clear()"])
def test_the_clusters_books_cannot_be_changed(tmp_path: Path, change: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=re.escape("'tuple' object")):
        run(tmp_path, "routing", f"def choose(self, request, view):\n    {change}\n    return 0")


def test_an_unknown_type_of_an_option_is_named(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from sim.protocols import RoutingPolicy\n"
        "@dataclass\n"
        "class Own(RoutingPolicy):\n"
        "    share: 'Nope' = 1\n"
        "    def choose(self, request, view): return 0\n"
    )
    with pytest.raises(UserError, match=r"Own: the type of a field is unknown .*'Nope'"):
        simulate(generate="constant:rate=1,n=1,prompt=1,output=1", routing=f"{file}:Own")
