"""`calibrate from-logs`: parameters that made the logs are found again, and mistakes are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.cli import main
from calibrate.logs.parameters import with_fit
from sim.cost.hardware import gpu as gpu_named
from sim.cost.profile import for_gpu, load, save
from sim.cost.server import ServerFit, server_fit
from sim.run import simulate

SERVER = ("--model", "llama-3-8b", "--gpu", "a100-80g")
TRUTH = ServerFit({"attention": 1.3, "linear": 1.1}, {}, {"delivery_us": 9e3})
STEPS = (
    "start=start_s,end=end_s,decodes=num_decodes,context=decode_context,"
    "context_sq=decode_context_sq,prefill_tokens=prefill_tokens,prefills=num_prefills,"
    "sampled=num_sampled"
)
REQUESTS = "arrival=arrival_s,prompt=prompt_tokens,output=output_tokens,ttft=ttft_s,e2e=e2e_s"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of a server whose kernels are slower than the built-in profile says."""
    folder = tmp_path_factory.mktemp("logs")
    base = for_gpu(gpu_named("a100-80g"))
    save(replace(base, entries=with_fit(base, TRUTH, {"model": "x"})), folder / "truth.json")
    result = simulate(
        model="llama-3-8b",
        gpu="a100-80g",
        generate="poisson:rate=5,n=300,prompt=lognormal(800,2000,max=4000),"
        "output=lognormal(120,300,max=800)",
        cost={"profile": str(folder / "truth.json")},
        capacity_probe=False,
    )
    result.requests.to_parquet(folder / "requests.parquet")
    result.steps.to_csv(folder / "steps.csv.gz", index=False)
    return folder


@pytest.mark.parametrize(
    ("log", "columns"), [("steps.csv.gz", STEPS), ("requests.parquet", REQUESTS)]
)
def test_the_parameters_that_made_the_logs_are_found(
    logs: Path, log: str, columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fitted.json"
    args = ["from-logs", str(logs / log), "--columns", columns, *SERVER, "--out", str(out)]
    assert main([*args, "--json"]) == 0
    json.loads(capsys.readouterr().out)
    found = server_fit(load(out))
    if log.startswith("steps"):  # latencies alone hardly tell the two scales apart
        assert found.scale("linear") == pytest.approx(1.1, rel=0.01)
        assert found.scale("attention") == pytest.approx(1.3, rel=0.03)
    again = simulate(
        model="llama-3-8b",
        gpu="a100-80g",
        generate="poisson:rate=5,n=300,prompt=lognormal(800,2000,max=4000),"
        "output=lognormal(120,300,max=800)",
        cost={"profile": str(out)},
        capacity_probe=False,
    )
    truth = simulate(again.scenario.with_({"cost": {"profile": str(logs / "truth.json")}}))
    assert again.requests["tpot_s"].mean() == pytest.approx(
        truth.requests["tpot_s"].mean(), rel=0.03
    )


def test_mistakes_are_named(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = str(logs / "steps.csv.gz"), str(tmp_path / "p.json")
    for args, said in [
        ([log, *SERVER, "--out", out], "--columns"),
        (
            [
                log,
                "--columns",
                "duration=nope,decodes=num_decodes,context=decode_context",
                *SERVER,
                "--out",
                out,
            ],
            "nope",
        ),
        ([log, "--columns", STEPS, "--gpu", "h100", "--out", out], "--model"),
        ([str(tmp_path / "none.csv"), "--columns", STEPS, *SERVER, "--out", out], "none.csv"),
        ([log, "--columns", STEPS, *SERVER, "--out", str(tmp_path)], "--out"),
        ([log, "--columns", STEPS, *SERVER, "--keep", "atention", "--out", out], "attention"),
    ]:
        assert main(["from-logs", *args]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.strip().splitlines()) == 1, error
    assert not Path(out).exists()
