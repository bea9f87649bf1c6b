"""`simulate --execute`: the command with the real engine behind it."""

from __future__ import annotations

import json
import time

import pytest

from sim.cli import main

BASE = [
    "--model", "small", "--generate", "poisson:rate=20,n=12,prompt=lognormal(40,90),output=5",
    "--set", "engine.num_gpu_blocks=129", "--set", "engine.max_model_len=512",
    "--set", "engine.max_num_batched_tokens=256", "--set", "engine.max_num_seqs=8",
]  # fmt: skip


def run(capsys, *args: str) -> dict:
    assert main([*BASE, "--json", "--quiet", *args]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("extra", [[], ["--set", "engine.async_scheduling=false"]])
def test_execute_serves_the_trace_and_says_what_measured_it(capsys, extra):
    found = run(capsys, "--execute", "cpu", *extra)
    assert found["requests"]["completed"] == 12
    assert "real engine" in found["cost_model"]["provenance"]
    assert found["time"]["attention"] > 0
    assert found["time"]["linear"] > found["time"]["host"] > 0
    simulated = run(capsys, *extra)
    assert set(simulated) == set(found)
    assert "real engine" not in simulated["cost_model"]["provenance"]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_execute_speculates(capsys, method):
    spec = ["--set", "engine.num_speculative_tokens=2", "--set", f"engine.spec_method={method}"]
    if method == "draft_model":
        assert main([*BASE, "--execute", "cpu", *spec]) == 2
        assert "set execute.draft_model" in capsys.readouterr().err
        spec += ["--set", "execute.draft_model=small"]
    assert run(capsys, "--execute", "cpu", *spec)["requests"]["completed"] == 12


def test_execute_on_two_replicas(capsys):
    found = run(capsys, "--execute", "cpu", "--replicas", "2", "--routing", "round-robin")
    assert found["requests"]["completed"] == 12


def test_wall_clock_takes_as_long_as_the_trace(capsys):
    begin = time.monotonic()
    found = run(
        capsys, "--execute", "cpu", "--wall-clock", "--set", "engine.async_scheduling=false"
    )
    assert found["requests"]["completed"] == 12
    assert found["ttft_s"]["mean"] > 0
    assert time.monotonic() - begin > 0.3  # 12 requests at 20 a second


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--wall-clock"], "--wall-clock is for --execute"),
        (["--execute", "tpu"], "unknown device 'tpu'"),
        (["--execute", "cpu", "--tp", "2"], "the real engine runs on one device"),
        (["--execute", "cpu", "--set", "engine.num_gpu_blocks=90000000"], "set a smaller"),
        (["--execute", "cpu", "--model", "OPT-125M"], "the real engine cannot run OPT-125M"),
        (["--execute", "cpu", "--set", "execute.dtype=int3"], "unknown dtype 'int3'"),
    ],
)  # fmt: skip
def test_execute_mistakes_are_one_line(capsys, args, message):
    assert main([*BASE, *args]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
