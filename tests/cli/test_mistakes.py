"""Mistakes of the user: one clear line on stderr, nothing on stdout, exit status 2."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sim.cli import main

GOOD = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
SMALL = ["--generate", "constant:rate=2,n=3,prompt=10,output=2"]

Fail = Callable[..., str]


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Fail:
    """Run the command with these arguments; its one line of complaint."""

    def run(*args: object) -> str:
        status = main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert status == 2
        assert out == ""
        assert err.startswith("simulate: error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        assert "usage" not in err
        assert "Traceback" not in err
        return err

    return run


def test_no_requests(fail: Fail) -> None:
    assert "--trace FILE" in fail()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--modle", "x"], "unknown flag '--modle'; did you mean '--model'"),
        (["--polic=chunked"], "did you mean '--policy'"),
        (["--trace"], "expected one argument"),
        (["stray"], "unrecognized arguments: stray"),
        ([""], "unrecognized arguments"),
        (["--set", "model"], "--set path=value"),
        (["--set", "=3"], "--set path=value"),
        (["--set", "engine.max_num_seq=3"], "did you mean 'max_num_seqs'"),
        (["--set", "seeed=3"], "did you mean 'seed'"),
        (["--set", "seed.x=3"], "seed must be a whole number"),
        (["--model", "llama-3-9b"], "unknown model 'llama-3-9b'; did you mean"),
        (["--gpu", "h1000"], "unknown GPU 'h1000'; did you mean"),
        (["--policy", "chunk"], "unknown scheduling policy 'chunk'; did you mean 'chunked'"),
        (["--policy", "priority", "--set", "policy.x=1"], "unknown option of .*'x'"),
        (["--routing", "roundrobbin"], "did you mean 'round-robin'"),
        (["--set", "admission=queue"], "did you mean 'queue-limit'"),
        (["--compare", "chunked,statik"], "did you mean 'static'"),
        (["--compare", ","], "--compare needs policy names"),
        (["--slo", "ttft"], "--slo ttft: write --slo"),
        (["--slo", "tttf=1"], "did you mean 'ttft_s'"),
        (["--slo", "ttft=soon"], "slo.ttft_s must be a number"),
        (["--limit", "0"], "limit must be at least 1"),
        (["--limit", "1.5"], "limit must be a whole number"),
        (["--rate-scale", "-2"], "rate_scale must be positive"),
        (["--start", "60", "--end", "50"], "time window: needs 0 <= start < end"),
        (["--end", "soon"], "end_s must be a number, got 'soon'"),
        (["--admission", "queue-limt"], "did you mean 'queue-limit'?"),
        (["--eviction", "lur"], "did you mean 'lru'?"),
        (["--replicas", "0"], "replicas must be at least 1"),
        (["--tp", "0"], "tensor_parallel_size must be at least 1"),
        (["--tp", "3"], "3"),
        (["--columns", "arrival=ts"], "--columns is about a trace file"),
        (["--model", "llama-3-70b"], "does not fit .* GB short"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["--out", "/proc/nowhere"], "cannot write there"),
        (["--set", "engine.num_gpu_blocks=1"], "num_gpu_blocks must be at least 2"),
        (["--set", "cost.profile=/nowhere.json"], "cannot read the profile"),
        (["--profile", "h1000"], "unknown profile 'h1000'; did you mean 'H"),
        (["--profile", "h100"], "the profile is for H100-SXM, not for A100-80G"),
        (["--profile", "own/h100.json"], "own/h100.json: cannot read the profile"),
        (["--set", "cost.frontend=fax"], "unknown frontend 'fax'"),
        (["--set", "cost.engine_version=new"], "engine version 'new'"),
        (["--set", "cost.engine_version=-1"], "engine version '-1'"),
        (["--set", "engine.quantization=fp9"], "unknown quantization 'fp9'; did you mean 'fp8'"),
        (["--set", "engine.quantization=mxfp4"], "mxfp4 is for experts"),
        (["--set", "engine.enable_expert_parallel=true"], "Llama-3-8B has no experts"),
        (["--set", "engine.data_parallel_size=2"], "use 2 replicas"),
        (["--set", "warm_up_s=1e9"], "below 1e9"),
        (["--set", f"engine.block_size={'[' * 3000}"], "must be a whole number"),
        (["--set", "engine.block_size=!!int x"], "must be a whole number"),
        (["--slo", ""], "--slo '': write --slo"),
        (["--slo", "ttft=1,ttft=2"], "ttft is named twice"),
        (["--config", ""], "is a directory"),
        (["--config", "/dev/zero"], "is not a regular file"),
        (["--out", ""], "--out needs the name of a folder"),
        (["--out", "a\0b"], "cannot write there"),
        (["--compare", "chunked,static,CHUNKED"], "a policy is named twice"),
        (["--compare", "chunked,static", "--policy", "priority"], "not among --compare"),
        (["--policy", "chunked", "--set", "policy.x=1"], "'x' .known: none"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_settings(fail: Fail, args: list[str], message: str) -> None:
    import re

    assert re.search(message, fail(*SMALL, *args))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed: 1\nseed: 2", "found 'seed' twice in line 2, column 1"),
        ("engine: {block_size: 16, block_size: 32}", "found 'block_size' twice"),
        ("seed: !!int x", "not valid YAML"),
        ("seed: [1", "not valid YAML"),
        ("seed: " + "[" * 3000, "nested too deep"),
        ("seed: 2020-01-01", "seed must be a whole number"),
        ("a: &a [*a]", "unknown scenario field 'a'"),
        ("- 1", "a scenario is a mapping of fields, not a list"),
        ("seed: \0", "not valid YAML"),
        ("seed: \udcff", "not UTF-8 text"),
    ],
)
def test_wrong_scenario_files(fail: Fail, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert message in fail("--config", file, *SMALL)


def test_a_pipe_as_scenario_does_not_hang(fail: Fail, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in fail("--config", tmp_path / "pipe")
    assert "is not a regular file" in fail("--trace", tmp_path / "pipe")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("poisson", "must begin with its arrivals"),
        ("poison:rate=1,n=3,prompt=1,output=1", "did you mean 'poisson'"),
        ("poisson:rate=1,n=3,prompt=lognorm(3,4),output=1", "did you mean 'lognormal'"),
        ("poisson:rate=0,n=3,prompt=1,output=1", "rate must be above 0"),
        ("poisson:rate=1,n=3,prompt=0,output=1", "prompt"),
        ("poisson:rate=1,prompt=1,output=1", "n=REQUESTS or duration_s"),
    ],
)
def test_wrong_workloads(fail: Fail, spec: str, message: str) -> None:
    assert message in fail("--generate", spec)


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"", "", "empty"),
        (GOOD.split("\n")[0].encode() + b"\n", "", "no rows"),
        (GOOD.encode() + b"2023-11-16 18:15:47.0,-5,44\n", "line 3", "-5"),
        (GOOD.encode() + b"2023-11-16 18:15:47.0,5,0\n", "line 3", "0"),
        (GOOD.encode() + b"2023-11-16 18:15:47.0,five,44\n", "line 3", "five"),
        (GOOD.encode() + b"2023-11-16 18:15", "line 3", ""),
        (GOOD.encode() + b"yesterday,374,44\n", "line 3", "yesterday"),
        (b"\x00\x01\x02\x03" * 100, "", "binary"),
        (b"a,b,c\n1,2,3\n", "", "--columns"),
    ],
)
def test_bad_trace_files(
    fail: Fail, tmp_path: Path, content: bytes, line: str, reason: str
) -> None:
    file = tmp_path / "trace.csv"
    file.write_bytes(content)
    complaint = fail("--trace", file)
    assert str(file) in complaint
    assert line in complaint
    assert reason in complaint


def test_missing_trace_and_folder(fail: Fail, tmp_path: Path) -> None:
    assert "cannot be read" in fail("--trace", tmp_path / "none.csv")
    assert "is a directory" in fail("--trace", tmp_path)
    assert "error: '': is a directory" in fail("--trace", "")
    assert "error: ' ': cannot be read" in fail("--trace", " ")


def test_trace_and_workload_together(fail: Fail) -> None:
    assert "not both" in fail(*SMALL, "--trace", "a.csv")


def test_errors_in_a_users_policy_name_its_line(fail: Fail, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from sim.protocols import RoutingPolicy\n"
        "class Broken(RoutingPolicy):\n"
        "    def choose(self, request, view):\n"
        "        return view.replica[0]\n"
    )
    complaint = fail(*SMALL, "--routing", f"{own}:Broken")
    assert f"{own}:4: AttributeError" in complaint


@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import sys; sys.exit('bye')"])
def test_a_users_policy_that_exits_is_an_error(fail: Fail, tmp_path: Path, code: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(code)
    assert f"{own}:1: SystemExit" in fail(*SMALL, "--routing", f"{own}:Own")


def test_routing_out_of_range(fail: Fail, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from sim.protocols import RoutingPolicy\n"
        "class Far(RoutingPolicy):\n"
        "    def choose(self, request, view):\n"
        "        return 5\n"
    )
    assert "chose replica 5" in fail(*SMALL, "--routing", f"{own}:Far")
