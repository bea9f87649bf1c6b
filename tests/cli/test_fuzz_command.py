"""Whatever one types, writes into a scenario or finds in a trace: an answer, or one line.

Seeded: a failure names what was run. More: FUZZ=20 pytest tests/cli/test_fuzz_command.py
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.cli import main
from sim.scenario import Scenario

MORE = int(os.environ.get("FUZZ", "1"))
CASES = 60
SECONDS = 20
"""More than that is a hang: the requests are few."""

WORKLOAD = (
    "poisson:rate=20,n=12,prompt=uniform(1,400),output=uniform(1,12),system=2x40,"
    "priorities=mix(0=0.5,1=0.5)"
)
NUMBERS: list[Any] = [
    *(0, 1, 2, 3, 7, 16, -1, 0.5, 1.5, 1e30, 1e-300, "nan", "inf", "1e3", "x", "", "null", "true"),
    *("[1]", "{a: 1}", "0x10", "2020-01-01", "1_0", "é", "-"),
]
BAD_LEAVES: list[Any] = [
    *(None, True, "", "x", -1, 0, 1, 2.5, 1e30, float("nan"), float("inf"), 10**40, "1e3", "é"),
    *([], [1, "a"], {}, {"a": {"b": 1}}),
]
NAMES = {
    "--model": ["llama-3-8b", "Llama-3.2-1B", "mixtral-8x7b", "lama", "x.json", "/tmp"],
    "--gpu": ["a100", "H100", "l4", "h10", "tpu"],
    "--policy": ["chunked", "static", "continuous", "priority", "chunk", "a:b", "a.py:B", ":"],
    "--routing": ["round-robin", "least-requests", "robin", "json:dumps"],
    "--compare": ["chunked,static", "chunked,chunked", ",", "chunked,nope"],
    "--slo": ["ttft=1", "ttft=1,tpot=0.05", "ttft", "tttf=1", "ttft=-1", "e2e=nan", "=1"],
    "--generate": [WORKLOAD, "poisson", "constant:rate=3,n=4,prompt=9000,output=2", "x:y=z"],
    "--arrivals": ["poisson:rate=8", "constant:rate=0", "gamma:rate=3"],
    "--columns": ["arrival=a,prompt=b,output=c", "prompt=a", "a"],
    "--format": ["azure", "azur", ""],
    "--seeds": ["2", "3", "1", "x", ""],
    "--profile": ["a100", "A100-80G", "l4", "h1000", "none.json", ""],
    "--list": ["gpus", "fields", "gpu", ""],
}
NUMERIC = ["--start", "--end", "--limit", "--rate-scale", "--tp", "--seed"]
SWITCHES = ["--json", "--quiet", "--no-fast-forward", "--skip-bad-rows", "--wall-clock", "--jsn"]
ENGINE = {
    "max_num_seqs": [1, 2, 64],
    "max_num_batched_tokens": [1, 16, 512, 8192],
    "max_num_scheduled_tokens": [1, 16],
    "max_num_active_seqs": [1, 4],
    "block_size": [1, 5, 16, 256],
    "num_gpu_blocks": [2, 5, 40, 1000],
    "max_model_len": [1, 8, 300, 100_000],
    "gpu_memory_utilization": [0.1, 0.3, 1.0],
    "watermark": [0.01, 0.9],
    "long_prefill_token_threshold": [1, 64],
    "sliding_window": [1, 64],
    "num_speculative_tokens": [1, 3],
    "prefill_schedule_interval": [2, 100],
    "pipeline_parallel_size": [2, 33],
    "data_parallel_size": [1, 2],
    "cudagraph_capture_sizes": [[1, 8], [0]],
    "async_scheduling": [True, False],
    "enable_prefix_caching": [True, False],
    "enable_chunked_prefill": [True, False],
    "enforce_eager": [True],
    "dtype": ["bf16", "fp9"],
    "kv_cache_dtype": ["fp8", "x"],
    "quantization": ["fp8", "x"],
    "spec_method": ["eagle", "x"],
    "policy": ["priority"],
}
FIELDS = {
    "slo.ttft_s": [0.1],
    "client.timeout_s": [0.001, 0.3],
    "horizon_s": [0.001, 0.4],
    "warm_up_s": [0.2, 100],
    "start_s": [0.1, 100],
    "end_s": [0.1, 100],
    "cluster.replicas": [1, 3],
    "cost.frontend": ["network", "fax"],
    "cost.engine_version": ["0.8", "new"],
    "cost.host_zero": ["true"],
    "cost.profile": ["none.json"],
    "admission": ["queue-limit", "queue"],
    "admission.max_requests": [1],
    "eviction": ["lru", "lfu"],
    "policy.reserve": ["max"],
    "trace.path": ["none.csv"],
    "generate.n": [3],
}
TRACES = [
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    b"2023-11-16 18:15:50.9951690,39,10\n2023-11-16 18:15:51.2225670,87,6",
    b'{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    b'{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]}\n',
    b"num_prefill_tokens,num_decode_tokens\n10,20\n30,4\n",
]

Run = Callable[..., int]


@contextmanager
def deadline(what: object) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"hangs: {what}")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command: an answer or one line of complaint; its exit status."""

    def check(argv: list[str], about: object = "") -> int:
        what = f"{argv} {about}"
        with deadline(what), warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                status = main(argv)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{type(error).__name__}: {error}: {what}") from error
        out, err = capsys.readouterr()
        lines = err.splitlines()
        if status == 0:
            assert out, what
            assert all(line.startswith("simulate: note: ") for line in lines), (err, what)
            if "--json" in argv:
                json.loads(out, parse_constant=lambda word: pytest.fail(f"{word}: {what}"))
        else:
            assert status == 2, what
            assert out == "", what
            assert len(lines) == 1, (err, what)
            assert lines[0].startswith("simulate: error: "), (err, what)
            assert len(lines[0]) < 2000, (err, what)
        return status

    return check


def garble(rng: random.Random, text: str) -> str:
    """A typing mistake."""
    if not text:
        return rng.choice("=:,x")
    i = rng.randrange(len(text))
    wrong = [text[:i] + text[i + 1 :], text[:i] + rng.choice("=:,.()x-\0 é") + text[i:], text[:i]]
    return rng.choice(wrong)


def affordable(argv: list[str]) -> bool:
    """Not a workload or a cluster that is only large."""
    return not any(re.search(r"[1-9]\d{4}|e\d|[1-9]\d{3}x", a) for a in argv if ":" in a)


def some_arguments(rng: random.Random) -> list[str]:
    argv: list[str] = []
    for _ in range(rng.randint(0, 4)):
        kind = rng.random()
        if kind < 0.3:
            flag = rng.choice(list(NAMES))
            argv += [flag, rng.choice(NAMES[flag])]
        elif kind < 0.5:
            argv += [rng.choice(NUMERIC), str(rng.choice(NUMBERS))]
        elif kind < 0.6:
            argv.append(rng.choice(SWITCHES))
        elif kind < 0.7:
            name = rng.choice(list(FIELDS))
            numbers = [] if name == "cluster.replicas" else NUMBERS
            argv += ["--set", f"{name}={rng.choice(FIELDS[name] * 5 + numbers)}"]
        else:
            name = rng.choice(list(ENGINE))
            argv += ["--set", f"engine.{name}={rng.choice(ENGINE[name] * 3 + NUMBERS)}"]
    if rng.random() < 0.3 and argv:
        i = rng.randrange(len(argv))
        argv[i] = garble(rng, argv[i])
    return argv


@pytest.mark.parametrize("seed", range(4 * MORE))
def test_arguments(run: Run, seed: int) -> None:
    rng = random.Random(seed)
    answers = 0
    for case in range(CASES):
        argv = ["--generate", WORKLOAD, "--set", "capacity_probe=false", *some_arguments(rng)]
        if affordable(argv) and "--execute" not in argv:
            answers += run(argv, f"(seed {seed}, case {case})") == 0
    assert answers > CASES / 10


def change_a_leaf(rng: random.Random, tree: dict[str, Any]) -> None:
    """Replace, remove or add something somewhere."""
    here: Any = tree
    while True:
        name = rng.choice(list(here)) if here else "x"
        below = here.get(name)
        if not isinstance(below, dict) or not below or rng.random() < 0.2:
            break
        here = below
    kind = rng.random()
    if kind < 0.7:
        here[name] = rng.choice(BAD_LEAVES)
    elif kind < 0.85:
        here.pop(name, None)
    else:
        here[rng.choice(["x", 1, None, name + "s"])] = rng.choice(BAD_LEAVES)


@pytest.mark.parametrize("seed", range(2 * MORE))
def test_scenario_files(run: Run, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    file = tmp_path / "scenario.yaml"
    for case in range(CASES):
        tree = Scenario.of(generate=WORKLOAD, capacity_probe=False).to_dict()
        chosen = rng.sample(list(ENGINE), rng.randint(0, 2))
        tree["engine"] = {name: rng.choice(ENGINE[name]) for name in chosen}
        tree["execute"] = {}  # the real engine is not what is tried here
        for _ in range(rng.randint(0, 2)):
            change_a_leaf(rng, tree)
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        data = text.encode()
        if rng.random() < 0.3:
            data = damage(rng, data)
        file.write_bytes(data)
        dear = re.search(rb"replicas: *'?[1-9]\d\d|rate=\d*e|n=\d{4}", data)
        if not dear and b"device: " not in data:
            run(["--config", str(file), "--json"], f"(seed {seed}, case {case}) {data!r}")


def damage(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut out, repeated or cut off."""
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:i] + bytes([rng.randrange(256)]) + data[i + 1 :]
        elif kind == 1:
            data = (
                data[:i]
                + rng.choice([b"\n", b",", b'"', b"-", b"\0", b"\xff", b"9", b"{"])
                + data[i:]
            )
        elif kind == 2:
            data = data[:i] + data[i + rng.randint(1, 30) :]
        elif kind == 3:
            data += data[i:]
        else:
            data = data[:i]
    return data


@pytest.mark.parametrize("seed", range(3 * MORE))
def test_traces(run: Run, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for case in range(CASES):
        data = rng.choice(TRACES)
        if rng.random() < 0.9:
            data = damage(rng, data)
        if rng.random() < 0.2:
            data = gzip.compress(data)
            data = damage(rng, data) if rng.random() < 0.5 else data
        file = tmp_path / "trace"
        file.write_bytes(data)
        argv = ["--trace", str(file), "--set", "capacity_probe=false"]
        for flag in ("--skip-bad-rows", "--json"):
            argv += [flag] if rng.random() < 0.5 else []
        argv += ["--arrivals", "poisson:rate=8"] if rng.random() < 0.3 else []
        run(argv, f"(seed {seed}, case {case}) {data!r}")


@pytest.mark.parametrize("seed", range(6 * MORE))
def test_processes(seed: int) -> None:
    """The exit status and the streams of a real process."""
    rng = random.Random(seed)
    argv = ["--generate", WORKLOAD, "--set", "capacity_probe=false", *some_arguments(rng)]
    if seed % 2:
        argv.append(rng.choice(["--nope", "--model=nope", "--set=x", "stray", "--limit=0"]))
    argv = [a.replace("\0", "") for a in argv]
    if not affordable(argv):
        pytest.skip("only large")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "sim.cli", *argv],
        capture_output=True, text=True, timeout=3 * SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 2), (argv, done.stderr)
    assert bool(done.stdout) == (done.returncode == 0), (argv, done.stderr)
    assert "Traceback" not in done.stderr, (argv, done.stderr)
    if seed % 2:
        assert done.returncode == 2, argv
        assert done.stderr.count("\n") == 1, (argv, done.stderr)
