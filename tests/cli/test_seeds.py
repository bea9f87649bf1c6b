"""`simulate --seeds`: means and intervals over runs that differ in their seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import traces
from sim import simulate
from sim.cli import main
from sim.scenario import Scenario
from sim.seeds import Replication

RANDOM = "poisson:rate=6,n=40,prompt=lognormal(300,900),output=lognormal(30,90)"
Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def go(*args: object, status: int = 0) -> str:
        assert main([str(a) for a in args]) == status
        out, err = capsys.readouterr()
        return err if status else out

    return go


def test_means_and_intervals_are_those_of_the_single_runs(run: Run) -> None:
    document = json.loads(run("--generate", RANDOM, "--seeds", 4, "--seed", 3, "--json"))
    assert document["seeds"]["values"] == [3, 4, 5, 6]
    singles = [simulate(generate=RANDOM, seed=seed).summary for seed in (3, 4, 5, 6)]
    values = [one["ttft_s"]["p90"] for one in singles]
    found = document["metrics"]["ttft_s.p90"]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert found["mean"] == pytest.approx(np.mean(values))
    assert (found["ci95_low"], found["ci95_high"]) == pytest.approx((low, high))
    assert (found["min"], found["max"], found["runs"]) == (min(values), max(values), 4)
    assert [one["run"]["seed"] for one in document["runs"]] == [3, 4, 5, 6]
    for one, alone in zip(document["runs"], singles, strict=True):
        assert one["e2e_s"] == alone["e2e_s"]
    assert sum(document["verdicts"].values()) == 4
    unknown = document["metrics"]["goodput.slo_attainment"]
    assert unknown["mean"] is None
    assert unknown["runs"] == 0


def test_table_has_means_with_their_intervals(run: Run) -> None:
    table = run("--generate", RANDOM, "--seeds", 3)
    assert "seeds       0 to 2: the seed draws the generated requests" in table
    line = next(line for line in table.splitlines() if line.startswith("TTFT mean"))
    assert line.count("ms") == 4
    assert " ± " in line


def test_what_does_not_depend_on_the_seed_is_said(run: Run) -> None:
    sample = ("--trace", traces.sample_path(), "--limit", 30)
    table = run(*sample, "--seeds", 5)
    assert "one run stands for all 5: nothing here depends on the seed" in table
    assert "±" not in table
    document = json.loads(run(*sample, "--seeds", 5, "--json"))
    assert (document["seeds"]["runs"], len(document["runs"])) == (1, 1)
    alone = json.loads(run(*sample, "--json"))
    assert document["metrics"]["ttft_s.mean"]["mean"] == alone["ttft_s"]["mean"]
    assert document["metrics"]["ttft_s.mean"]["ci95_half_width"] is None


def test_a_policy_that_draws_numbers_depends_on_the_seed(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from sim.protocols import RoutingPolicy\n"
        "class Random(RoutingPolicy):\n"
        "    def prepare(self, rng):\n"
        "        self.rng = rng\n"
        "    def choose(self, request, view):\n"
        "        return int(self.rng.integers(len(view.replicas)))\n"
    )
    args = ("--trace", traces.sample_path(), "--limit", 200, "--replicas", 2, "--seeds", 3)
    document = json.loads(run(*args, "--routing", f"{own}:Random", "--json"))
    assert document["seeds"]["draws"] == [f"routing ({own}:Random)"]
    assert document["metrics"]["ttft_s.p99"]["ci95_half_width"] > 0
    assert document["metrics"]["requests.total"]["ci95_half_width"] == 0


def test_arrivals_and_accepted_drafts_are_drawn() -> None:
    base = Scenario.of(trace={"path": "t.csv", "arrivals": "poisson:rate=2"})
    assert Replication.of(base, "2").draws == ["arrivals (poisson:rate=2)"]
    drafts = Scenario.of(trace="t.csv", engine={"num_speculative_tokens": 3})
    assert Replication.of(drafts, "2").draws == ["accepted drafts"]
    spec = {
        "engine.num_speculative_tokens": 3,
        "generate": "constant:rate=1,n=5,prompt=9,output=99",
    }
    first, second = (
        simulate(Scenario().with_({**spec, "seed": seed})).summary["e2e_s"]["mean"]
        for seed in (0, 1)
    )
    assert first != second


def test_compared_policies_have_a_column_each(run: Run, tmp_path: Path) -> None:
    args = ("--generate", RANDOM, "--seeds", 2, "--compare", "chunked,static")
    table = run(*args)
    assert next(x for x in table.splitlines() if "static" in x).split() == ["chunked", "static"]
    document = json.loads(run(*args, "--json", "--out", tmp_path))["compare"]
    assert list(document) == ["chunked", "static"]
    assert len(document["static"]["runs"]) == 2
    written: dict[str, Any] = json.loads((tmp_path / "static" / "seeds.json").read_text())
    assert written["metrics"] == document["static"]["metrics"]
    again = json.loads(run("--config", tmp_path / "static" / "seed-1" / "scenario.yaml", "--json"))
    assert again["e2e_s"] == document["static"]["runs"][1]["e2e_s"]


def test_same_seeds_give_the_same_bytes(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run("--generate", RANDOM, "--seeds", 2, "--out", tmp_path / name)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 9
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seeds", "1"], "--seeds must be a whole number from 2 to 1000"),
        (["--seeds", "many"], "got 'many'"),
        (["--seeds", "-3"], "got '-3'"),
        (["--seeds", "2", "--execute", "cpu"], "--seeds repeats a simulation"),
    ],
)
def test_mistakes(run: Run, args: list[str], message: str) -> None:
    complaint = run("--generate", RANDOM, *args, status=2)
    assert message in complaint
    assert complaint.count("\n") == 1
