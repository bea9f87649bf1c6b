"""The command as a user runs it: processes, files, pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import traces

SMALL = "poisson:rate=6,n=60,prompt=lognormal(300,900),output=lognormal(30,90)"
LATENCY_KEYS = {"mean", "p50", "p90", "p95", "p99", "max"}


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "sim.cli", *map(str, args)]


def simulate(*args: object, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*args), capture_output=True, text=True, timeout=120, check=False, **options
    )
    assert done.returncode == status, done.stderr
    return done


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    done = simulate("--generate", SMALL, "--slo", "ttft=1,tpot=0.1", "--json")
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_has_the_promised_keys(document: dict[str, Any]) -> None:
    assert (
        document["requests"].items()
        >= {
            "total": 60,
            "completed": 60,
            "rejected": 0,
            "aborted": 0,
            "unfinished": 0,
        }.items()
    )
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert document[name].keys() >= LATENCY_KEYS
        assert 0 < document[name]["p50"] <= document[name]["max"]
    assert document["throughput"].keys() >= {
        "requests_per_s",
        "output_tokens_per_s",
        "total_tokens_per_s",
    }
    assert document["goodput"].keys() >= {"requests_per_s", "slo_attainment"}
    assert document["stability"]["verdict"] == "stable"
    assert document["stability"].keys() >= {"offered_requests_per_s", "capacity_requests_per_s"}
    assert document["time"].keys() == {
        "attention",
        "linear",
        "moe",
        "communication",
        "host",
        "idle",
    }
    assert document["kv"].keys() >= {
        "num_blocks",
        "prefix_hit_rate",
        "preemptions",
        "peak_usage",
        "waste",
    }
    assert document["cost_model"].keys() >= {"profile", "provenance", "extrapolated_fraction"}
    assert document["run"].keys() >= {"seed", "steps", "events", "wall_s"}


def test_without_an_slo_goodput_is_null() -> None:
    document = json.loads(simulate("--generate", SMALL, "--json").stdout)
    assert document["goodput"] == {"requests_per_s": None, "slo_attainment": None}


def test_table_for_a_person_is_plain_text_in_a_pipe() -> None:
    done = simulate("--trace", traces.sample_path(), "--limit", "200")
    for word in ("TTFT", "TPOT", "ITL", "E2E", "throughput", "stability", "KV", "azure"):
        assert word in done.stdout
    assert "\033" not in done.stdout
    assert all(len(line) <= 160 for line in done.stdout.splitlines())


def test_out_folder_can_be_run_again_with_identical_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second" / "deeper"
    policy = tmp_path / "own.py"
    policy.write_text(
        "from policies.routing.least_requests import LeastRequests\n"
        "class Own(LeastRequests):\n    pass\n"
    )
    trace = tmp_path / "t.csv"
    trace.write_text("".join(traces.sample_path().read_text().splitlines(keepends=True)[:150]))
    simulate(
        *("--trace", "t.csv", "--replicas", 2, "--routing", "own.py:Own", "--seed", 5),
        *("--set", "engine.max_num_seqs=16", "--slo", "ttft=2", "--out", "first"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    simulate(
        "--config",
        first / "scenario.yaml",
        "--out",
        second,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    names = sorted(path.name for path in first.iterdir())
    assert names == ["requests.parquet", "scenario.yaml", "steps.parquet", "summary.json"]
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert yaml.safe_load((first / "scenario.yaml").read_text())["seed"] == 5
    summary = json.loads((first / "summary.json").read_text())
    assert "wall_s" not in summary["run"]
    requests = pd.read_parquet(first / "requests.parquet")
    steps = pd.read_parquet(first / "steps.parquet")
    assert len(requests) == summary["requests"]["total"] == 149
    assert len(steps) == summary["run"]["steps"]
    assert set(requests["replica"]) == {0, 1}


def test_generated_scenario_with_files_runs_again_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "own_router.py").write_text(
        "from policies.routing.round_robin import RoundRobin\nclass Own(RoundRobin):\n    pass\n"
    )
    lines = traces.sample_path().read_text().splitlines(keepends=True)[:50]
    (tmp_path / "t, (1).csv").write_text("".join(lines))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own.py").write_text(
        "from sim.protocols import SchedulingPolicy\nclass Mine(SchedulingPolicy):\n    pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    simulate(
        *("--generate", "poisson:rate=3,n=20,lengths=empirical('t, (1).csv')", "--out", "out"),
        *("--routing", "own_router:Own", "--replicas", 2, "--policy", "sub/own.py:Mine"),
        cwd=tmp_path,
        env=environment,
    )
    again = ("--config", tmp_path / "out" / "scenario.yaml", "--out", tmp_path / "again")
    simulate(*again, cwd="/", env=environment)
    for name in ("requests.parquet", "steps.parquet", "scenario.yaml", "summary.json"):
        ours, theirs = (tmp_path / folder / name for folder in ("out", "again"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_compare_prints_the_policies_side_by_side(tmp_path: Path) -> None:
    table = simulate("--generate", SMALL, "--compare", "chunked,continuous,static", "--quiet")
    assert [name for name in ("chunked", "continuous", "static") if name in table.stdout] == [
        "chunked",
        "continuous",
        "static",
    ]
    done = simulate(
        *("--generate", SMALL, "--compare", "chunked,static", "--json", "--quiet"),
        *("--out", tmp_path),
    )
    compared = json.loads(done.stdout)["compare"]
    assert list(compared) == ["chunked", "static"]
    assert compared["static"]["kv"]["waste"]["total"] > compared["chunked"]["kv"]["waste"]["total"]
    assert (tmp_path / "static" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (["engine.max_model_len=20000"], "beyond the 8192 tokens that Llama-3-8B knows"),
        (["engine.gpu_memory_utilization=0.218"], "vLLM would not start"),
        (["policy=static", "engine.enable_prefix_caching=true"], "enable_prefix_caching is off"),
        (
            ["policy=static", "engine.enable_chunked_prefill=true"],
            "enable_chunked_prefill is False",
        ),
        (["policy=continuous", "engine.max_num_batched_tokens=512"], "raised from 512 to 8192"),
    ],
)
def test_what_is_decided_otherwise_is_told(settings: list[str], note: str) -> None:
    flags = [word for setting in settings for word in ("--set", setting)]
    done = simulate("--generate", "constant:rate=1,n=2,prompt=10,output=2", "--json", *flags)
    assert done.stderr.startswith("simulate: note: ")
    assert note in done.stderr


def test_quantised_weights_leave_more_room_for_the_cache() -> None:
    run = ("--generate", "constant:rate=1,n=2,prompt=10,output=2", "--json")
    plain, quantised = (
        json.loads(simulate(*run, *more).stdout)["kv"]["num_blocks"]
        for more in ((), ("--set", "engine.quantization=fp8"))
    )
    assert quantised > plain * 1.1


def test_requests_too_long_for_context_or_cache_are_rejected_and_counted(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    rows = [(0, 100, 10), (0.1, 9000, 10), (0.2, 3000, 10), (0.3, 5000, 100), (0.4, 50, 5)]
    trace.write_text("".join(json.dumps({"t": t, "p": p, "o": o}) + "\n" for t, p, o in rows))
    done = simulate(
        *("--trace", trace, "--columns", "arrival=t,prompt=p,output=o", "--json"),
        *("--set", "engine.num_gpu_blocks=201"),
    )
    requests = json.loads(done.stdout)["requests"]
    assert requests["completed"] == 3
    assert requests["rejected"] == 2
    assert requests["rejected_by_reason"] == {"context": 1, "kv-capacity": 1}


def test_a_window_of_the_trace_behind_another_door() -> None:
    part = ("--trace", traces.sample_path(), "--start", "60", "--end", "120", "--json")
    whole = json.loads(simulate(*part).stdout)
    assert 200 < whole["requests"]["total"] < 500
    few = json.loads(simulate(*part, "--admission", "queue-limit", "--eviction", "lru").stdout)
    assert few["requests"]["total"] == whole["requests"]["total"]
    same = json.loads(simulate(*part, "--set", "admission=always").stdout)
    assert same["ttft_s"] == whole["ttft_s"]


def test_skipped_and_unsorted_rows_are_counted(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    lines = traces.sample_path().read_text().splitlines()[:20]
    lines[5], lines[9] = lines[9], lines[5]
    lines[7] = "junk,1,2"
    trace.write_text("\n".join(lines))
    document = json.loads(simulate("--trace", trace, "--skip-bad-rows", "--json").stdout)
    assert document["requests"]["completed"] == 18
    counts = document["trace"]["counts"]
    assert counts["rows_skipped"] == 1
    assert any("order" in k or "sort" in k for k in counts), counts


def test_a_reader_that_leaves_early_is_no_error() -> None:
    with subprocess.Popen(
        command("--generate", SMALL, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("--generate", SMALL),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == "simulate: error: cannot write to stdout: No space left on device\n"
    assert done.returncode == 2


def test_closed_stdout_and_stderr_are_no_error(tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = " ".join(
        command("--generate", SMALL.replace("(", "\\(").replace(")", "\\)"), "--out", out)
    )
    assert subprocess.run(f"{line} >&- 2>&-", shell=True, check=False).returncode == 0
    assert (out / "summary.json").is_file()


def test_names_that_no_encoding_has(tmp_path: Path) -> None:
    trace = tmp_path / os.fsdecode(b"\xff\n.csv")
    trace.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    out = tmp_path / "out"
    done = simulate("--trace", trace, "--json", "--out", out, env=plain)
    assert json.loads(done.stdout)["trace"]["name"] == trace.name
    assert json.loads((out / "summary.json").read_text())["trace"]["name"] == trace.name
    again = simulate("--config", out / "scenario.yaml", env=plain)
    assert "trace       '\\udcff\\n.csv' (azure), 1 request" in again.stdout


def test_interrupt_is_one_line() -> None:
    big = "poisson:rate=30,n=400000,prompt=lognormal(300,900),output=lognormal(30,90)"
    with subprocess.Popen(
        command("--generate", big), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(2.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err == "simulate: interrupted\n"


def test_profile_names_a_gpu_or_a_file(tmp_path: Path) -> None:
    from sim.cost.hardware import gpu
    from sim.cost.profile import for_gpu, save

    save(for_gpu(gpu("a100")), tmp_path / "own.json.gz")
    run = ("--generate", SMALL, "--json", "--quiet")
    found = [
        json.loads(simulate(*run, *flags, "--out", tmp_path / "out", cwd=tmp_path).stdout)
        for flags in ((), ("--profile", "a100"), ("--profile", "own.json.gz"))
    ]
    for document in found:
        del document["run"]
    assert found[0] == found[1] == found[2]
    stored = yaml.safe_load((tmp_path / "out" / "scenario.yaml").read_text())
    assert stored["cost"]["profile"] == str(tmp_path / "own.json.gz")


def test_import_is_light() -> None:
    code = (
        "import time; t = time.process_time(); import sim; from sim import simulate, Scenario;"
        "spent = time.process_time() - t; import sys;"
        "heavy = {'torch', 'triton', 'matplotlib', 'pyarrow'} & set(sys.modules);"
        "assert not heavy, heavy; assert spent < 1, spent"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_shows_the_flags() -> None:
    shown = simulate("--help").stdout
    for flag in ("--trace", "--policy", "--compare", "--set", "--out", "--json", "--seeds"):
        assert flag in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_help_is_printed_without_the_simulator() -> None:
    code = (
        "import sys; from sim.flags import build_parser; build_parser().format_help();"
        "heavy = {'numpy', 'pandas', 'yaml', 'simpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
