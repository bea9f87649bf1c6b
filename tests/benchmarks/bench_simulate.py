"""Speed and growth of `simulate`: CPU seconds and peak memory of the main jobs.

    python -m tests.benchmarks.bench_simulate [NAME ...]

Each job is the command, in a process of its own on one thread. `loop` are the CPU seconds of the
event loop alone, `command` those of the whole process, `us/request` the command's.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
AZURE = SHARED / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = SHARED / "mooncake_conversation_trace.jsonl.gz"
LENGTHS = "prompt=lognormal(1020,2735,max=8000),output=lognormal(129,424,max=1500)"
ONE_CORE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Job:
    name: str
    args: tuple[str, ...]
    budget: str
    needs: Path | None = None


def jobs(work: Path) -> list[Job]:
    no_cache = ("--set", "engine.enable_prefix_caching=false")
    azure10 = work / "azure_x10.csv"
    fleet = ("--replicas", "16", "--routing", "least-requests", *no_cache)
    return [
        Job(
            "azure",
            ("--trace", str(AZURE), "--rate-scale", "0.9", *no_cache),
            "loop < 0.6 s, command < 3 s",
            AZURE,
        ),
        Job(
            "azure-out",
            ("--trace", str(AZURE), "--rate-scale", "0.9", *no_cache, "--out", str(work / "out")),
            "as azure, with all tables written",
            AZURE,
        ),
        Job(
            "azure-x10",
            ("--trace", str(azure10), "--rate-scale", "0.9", "--replicas", "10", *no_cache),
            "no dearer per request than azure",
            AZURE,
        ),
        Job(
            "mooncake",
            (
                *("--trace", str(MOONCAKE), "--model", "llama-3.1-8b", "--gpu", "h100"),
                *("--replicas", "4", "--routing", "round-robin"),
            ),
            "command < 10 s",
            MOONCAKE,
        ),
        Job("fleet-100k", ("--generate", f"poisson:rate=64,n=100000,{LENGTHS}", *fleet), ""),
        Job(
            "fleet-1M",
            ("--generate", f"poisson:rate=64,n=1000000,{LENGTHS}", *fleet),
            "< 1.3 x the us/request of fleet-100k, peak < 2 GB",
        ),
    ]


def azure_times(times: int, to: Path) -> None:
    """The Azure trace with every row repeated, so that its rate grows and its shape stays."""
    head, *rows = AZURE.read_text().splitlines()
    to.write_text("\n".join([head, *(row for row in rows for _ in range(times))]) + "\n")


def measure(job: Job) -> str:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import resource, sys; from sim.cli import main; status = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr);"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *job.args, "--json", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ONE_CORE},
    )
    if done.returncode:
        return f"{job.name:<12} failed: {done.stderr.strip()}"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak_mb = int(done.stderr.split()[-1]) / 1024
    document = json.loads(done.stdout)
    requests, run = document["requests"], document["run"]
    return (
        f"{job.name:<12} {requests['total']:>9,} requests {run['steps']:>10,} steps "
        f"{run['events']:>9,} events   loop {run['cpu_s']:6.2f}   command {cpu:6.2f} CPU-s "
        f"{cpu / requests['total'] * 1e6:6.1f} us/request   peak {peak_mb:5.0f} MB   "
        f"rejected {requests['rejected']}   {document['stability']['verdict']}   "
        f"[{run['engine']}]   {job.budget}"
    )


def main(names: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for job in jobs(Path(folder)):
            if names and job.name not in names:
                continue
            if job.needs is not None and not job.needs.exists():
                print(f"{job.name:<12} needs {job.needs.name} in the shared traces")
                continue
            if job.name == "azure-x10":
                azure_times(10, Path(folder) / "azure_x10.csv")
            print(measure(job), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
