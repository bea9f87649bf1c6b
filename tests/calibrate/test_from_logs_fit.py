"""What made the logs is found again where they determine it, kept and said so where they do not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.cli import main
from calibrate.logs.fit import UNSERVED, _Requests
from calibrate.logs.records import Requests
from calibrate.logs.solve import Residuals, solve
from sim.cost.hardware import gpu
from sim.cost.profile import for_gpu, load, save
from sim.cost.server import ServerFit, server_entry, server_fit
from sim.errors import UserError
from tests.calibrate import logs

SYNC = ("--set", "engine.async_scheduling=false")


def calibrate(log: Path, out: Path, *more: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["from-logs", str(log), *logs.SERVER, "--out", str(out), *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fitted(document: Any) -> dict[str, float]:
    return {p["name"]: p["after"] for p in document["parameters"] if p["fitted"]}


def remark(document: Any, name: str) -> str:
    return next(str(p["remark"]) for p in document["parameters"] if p["name"] == name)


def held_out(document: Any, when: str, name: str) -> float:
    return float(document["errors"][when][name]["held_out"]["median"])


def test_steps_find_scales_and_the_synchronous_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = ServerFit({"attention": 1.4, "linear": 0.85}, {"sync_us": 2400, "sync_per_seq_us": 22})
    engine = {"max_num_seqs": 64, "async_scheduling": False}
    log = logs.steps_csv(logs.serve(tmp_path, truth, engine=engine), tmp_path / "s.csv", 0.03)
    found = calibrate(log, tmp_path / "p.json", *SYNC, "--columns", logs.STEPS, capsys=capsys)
    # Within two or three of the spreads that the fit itself states for 3 % of noise.
    assert fitted(found) == {
        "attention scale": pytest.approx(1.4, rel=0.05),
        "linear scale": pytest.approx(0.85, rel=0.02),
        "sync_us": pytest.approx(2400, rel=0.1),
        "sync_per_seq_us": pytest.approx(22, rel=0.15),
    }
    assert held_out(found, "after", "all steps") < 3.0 < held_out(found, "before", "all steps")


def test_a_host_hidden_behind_the_device_is_kept_and_a_slow_one_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ("--columns", logs.STEPS)
    hidden = logs.steps_csv(logs.serve(tmp_path, None), tmp_path / "hidden.csv", 0.02)
    found = calibrate(hidden, tmp_path / "p.json", *columns, capsys=capsys)
    assert set(fitted(found)) == {"attention scale", "linear scale"}
    assert remark(found, "async_us") == "hardly shows in these records"
    # Nothing is written that was not found.
    assert server_fit(load(tmp_path / "p.json")).host == {}
    slow = ServerFit(host={"async_us": 15e3})  # the device needs 12 to 16 ms for most steps
    log = logs.steps_csv(logs.serve(tmp_path, slow), tmp_path / "slow.csv", 0.02)
    found = calibrate(log, tmp_path / "p.json", *columns, capsys=capsys)
    assert fitted(found)["async_us"] == pytest.approx(15e3, rel=0.05)


def test_requests_find_what_their_latencies_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = ServerFit({"linear": 1.25}, {}, {"delivery_us": 12e3})
    result = logs.serve(tmp_path, truth, generate=logs.LOAD.format(n=300).replace("=6,", "=3,"))
    log = logs.requests_csv(result, tmp_path / "r.csv", 0.02)
    found = calibrate(log, tmp_path / "p.json", "--columns", logs.REQUESTS, capsys=capsys)
    values = fitted(found)
    assert values["linear scale"] == pytest.approx(1.25, rel=0.02)
    # Arrival and delivery add up in every latency: one of them takes it all, and it is said.
    assert values["delivery_us"] == pytest.approx(12e3, rel=0.25)
    assert "not told apart" in remark(found, "arrival_us")
    for latency in ("TTFT", "TPOT", "E2E"):
        before, after = (held_out(found, when, latency) for when in ("before", "after"))
        assert after < 5.0, latency
        assert after < before / 3, latency


LOAD = "poisson:rate=5,n=300,prompt=lognormal(800,2000,max=4000),output=lognormal(120,300,max=800)"
SLOWER = ServerFit({"attention": 1.3, "linear": 1.1}, {}, {"delivery_us": 9e3})


@pytest.mark.parametrize(
    ("name", "columns"), [("steps.csv.gz", logs.STEPS), ("requests.parquet", logs.REQUESTS)]
)
def test_the_profile_serves_as_the_server_that_made_the_logs(
    name: str, columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth, log, out = (
        logs.serve(tmp_path, SLOWER, generate=LOAD),
        tmp_path / name,
        tmp_path / "p.json",
    )
    if name.startswith("steps"):
        truth.steps.to_csv(log, index=False)
    else:
        truth.requests.to_parquet(log)
    calibrate(log, out, "--columns", columns, capsys=capsys)
    found = server_fit(load(out))
    if name.startswith("steps"):  # latencies alone hardly tell the two scales apart
        assert found.scale("linear") == pytest.approx(1.1, rel=0.01)
        assert found.scale("attention") == pytest.approx(1.3, rel=0.03)
    again = logs.serve(tmp_path, None, generate=LOAD, cost={"profile": str(out)})
    assert again.requests["tpot_s"].mean() == pytest.approx(
        truth.requests["tpot_s"].mean(), rel=0.03
    )


@pytest.mark.parametrize("tool", ["vllm bench serve", "guidellm", "inference-perf"])
def test_results_of_load_generators_are_fitted_as_they_are(
    tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = logs.serve(tmp_path, ServerFit({"linear": 1.2, "attention": 1.2}), 120).requests
    documents: dict[str, Any] = {
        "vllm bench serve": logs.vllm_bench(table),
        "guidellm": logs.guidellm(table),
        "inference-perf": logs.inference_perf(table),
    }
    log = tmp_path / "result.json"
    log.write_text(json.dumps(documents[tool]))
    found = calibrate(log, tmp_path / "p.json", capsys=capsys)
    assert found["logs"][0]["format"] == tool
    assert found["logs"][0]["records"] == 120
    assert found["errors"]["before"]["TPOT"]["held_out"]["bias"] < -12
    assert abs(found["errors"]["after"]["TPOT"]["held_out"]["bias"]) < 2


def test_a_closed_loop_is_replayed_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server twice as fast as the profile: replayed at the recorded times, the profile would
    drown in requests that a client of eight slots never sends."""
    truth = ServerFit({"linear": 0.5, "attention": 0.5})
    # The simulated server of eight sequences admits as a client of eight slots would send.
    result = logs.serve(
        tmp_path,
        truth,
        generate="poisson:rate=1000,n=120,prompt=lognormal(600,1800,max=4000),output=100",
        engine={"max_num_seqs": 8},
    )
    table = result.requests
    sent = table.first_scheduled_s
    table = table.assign(
        arrival_s=sent, ttft_s=table.first_token_s - sent, e2e_s=table.finish_s - sent
    ).sort_values("arrival_s")
    document = logs.vllm_bench(table, request_rate="inf", max_concurrency=8)
    log = tmp_path / "r.json"
    log.write_text(json.dumps(document))
    found = calibrate(
        log, tmp_path / "p.json", "--set", "cost.frontend=none", "--hold-out", "alternate",
        capsys=capsys,
    )  # fmt: skip
    assert found["logs"][0]["max_in_flight"] == 8
    # The profile alone is 2 times too slow, not 2 times and a queue.
    assert 70 < found["errors"]["before"]["E2E"]["fitted"]["bias"] < 110
    assert abs(found["errors"]["after"]["E2E"]["held_out"]["bias"]) < 3


def test_the_profile_serves_where_any_other_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sim.cli import main as simulate_main

    truth = ServerFit({"linear": 1.3})
    log = logs.steps_csv(logs.serve(tmp_path, truth), tmp_path / "s.csv")
    out = tmp_path / "p.json.gz"
    calibrate(log, out, "--columns", logs.STEPS, capsys=capsys)
    profile = load(out)
    entry = server_entry(profile)
    assert entry is not None
    assert entry.key["model"] == "Llama-3-8B"
    assert "s.csv" in profile.provenance
    one = "constant:rate=0.2,n=10,prompt=200,output=100"  # at a time: steps of one decode
    command = ["--generate", one, "--gpu", "a100-80g", "--json"]
    assert simulate_main([*command, "--set", f"cost.profile={out}"]) == 0
    with_it = json.loads(capsys.readouterr().out)
    assert simulate_main(command) == 0
    without = json.loads(capsys.readouterr().out)
    ratio = with_it["tpot_s"]["mean"] / without["tpot_s"]["mean"]
    assert 1.2 < ratio < 1.3
    points = tmp_path / "points.csv"
    points.write_text("gpu,dtype,m,n,k,us\nA100-80G,bf16,64,4096,4096,50\n")
    command = ["predict", "--profile", str(out), str(points), "--out", str(tmp_path / "o.csv")]
    assert main(command) == 0
    assert "without the scales of a server's steps" in capsys.readouterr().err


def test_a_fit_may_start_from_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logs.steps_csv(logs.serve(tmp_path, ServerFit({"linear": 1.3})), tmp_path / "s.csv")
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    calibrate(log, first, "--columns", logs.STEPS, capsys=capsys)
    again = calibrate(
        log, second, "--columns", logs.STEPS, "--profile", str(first), "--keep", "attention",
        capsys=capsys,
    )  # fmt: skip
    assert [p["before"] for p in again["parameters"]][1] == pytest.approx(1.3, rel=0.02)
    assert remark(again, "attention scale") == "kept as asked"
    kept = server_fit(load(second))
    assert kept.scale("attention") == server_fit(load(first)).scale("attention")
    assert len(list(load(second).of("server"))) == 1


class Recited:
    """In the place of a `Replay`: latencies by the attention scale asked for."""

    def __init__(self, e2e: dict[float, list[float]]) -> None:
        self._e2e = e2e

    def latencies(self, fit: ServerFit) -> dict[str, np.ndarray]:
        e2e = np.array(self._e2e[fit.scale("attention")])
        return {"ttft": e2e / 10, "tpot": np.full(len(e2e), np.nan), "e2e": e2e}


def test_means_are_compared_over_the_requests_that_both_served() -> None:
    """A simulated server that leaves the longest request out is not faster for that."""
    sent, nan = np.arange(4.0), np.full(4, np.nan)
    e2e = np.array([1.0, 2.0, 3.0, 50.0])
    tokens = np.array([10, 20, 30, 40])
    run = Requests("r", "test", sent, tokens, tokens[::-1], e2e / 10, nan, e2e)
    replay: Any = Recited({1.0: [1.0, 2.0, 3.0, 50.0], 2.0: [1.1, 2.2, 3.3, np.nan]})
    problem = _Requests([run], [replay], [np.ones(4, dtype=bool)], None)
    assert not problem.residuals(ServerFit()).values.any()
    found = problem.residuals(ServerFit({"attention": 2.0}))
    # Of TTFT and of E2E: a group of the four, and one of their mean.
    once = [*[math.log(1.1)] * 3, UNSERVED, math.log(1.1)]
    assert found.values == pytest.approx([*once, *once])
    assert found.group.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3]


def test_equal_logs_give_equal_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.requests_csv(logs.serve(tmp_path, None, 60), tmp_path / "r.csv", 0.05)
    for name in ("a.json", "b.json"):
        calibrate(log, tmp_path / name, "--columns", logs.REQUESTS, capsys=capsys)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_server_that_drafts_is_replayed_with_its_draft_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {
        "max_num_seqs": 64, "num_speculative_tokens": 3, "spec_method": "draft_model",
        "spec_model": "llama-3.2-1b",
    }  # fmt: skip
    log = logs.steps_csv(logs.serve(tmp_path, None, 30, engine=engine), tmp_path / "s.csv")
    same = [a for n, v in engine.items() for a in ("--set", f"engine.{n}={v}")]
    columns = logs.STEPS + ",decode_tokens=decode_tokens"
    found = calibrate(log, tmp_path / "p.json", *same, "--columns", columns, capsys=capsys)
    assert held_out(found, "before", "all steps") < 0.5


def test_a_gpu_that_borrows_its_profile_may_be_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = logs.serve(tmp_path, None, 60, gpu="h200")
    log = logs.requests_csv(result, tmp_path / "r.csv")
    out = tmp_path / "p.json"
    calibrate(log, out, "--columns", logs.REQUESTS, "--gpu", "h200", capsys=capsys)
    load(out).require(gpu("h200"))
    with pytest.raises(UserError, match="for H200"):
        load(out).require(gpu("h100"))


def test_text_says_what_a_reader_must_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logs.requests_csv(logs.serve(tmp_path, None, 60), tmp_path / "r.csv")
    command = ["from-logs", str(log), *logs.SERVER, "--out", str(tmp_path / "p.json")]
    assert main([*command, "--columns", logs.REQUESTS]) == 0
    shown = capsys.readouterr().out
    for words in (
        "requests in named columns (csv), 60 requests",
        "open loop",
        "prompts taken as all different",
        "Llama-3-8B on A100-80G",
        "42 fitted, 18 held out",
        "kept: ",
        "held out",
    ):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 110


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--set", "engine.max_num_seqs=2"), "max_num_seqs 2; give the server's own"),
        (("--set", "engine.max_num_batched_tokens=64"), "max_num_batched_tokens 64"),
        (("--hold-out", "half"), "--hold-out half: write last:0.3"),
        (("--hold-out", "last:0.99"), "--hold-out last:0.99"),
        (("--keep", "atention"), "unknown parameter 'atention'; did you mean 'attention'"),
        (("--set", "cost.profile=x"), "as --profile"),
        (("--set", "execute.device=cpu"), "leave execute.device out"),
        (("--set", "nothing"), "write --set path=value"),
        (("--output-tokens", "5"), "--output-tokens is about requests"),
        (("--out", "p.txt"), "a profile is a .json"),
        (("--out", "/nowhere/p.json"), "no file can be written there"),
        (("--gpu", "h100x"), "unknown GPU"),
        (("--columns", "duration=nope,decodes=num_decodes,context=decode_context"), "nope"),
        (("--out", "."), "--out"),
    ],
)
def test_mistakes_are_one_line(
    more: tuple[str, ...], said: str, steps_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["from-logs", str(steps_log), *logs.SERVER, "--columns", logs.STEPS]
    assert main([*command, "--out", str(steps_log.parent / "p.json"), *more]) == 2
    error = capsys.readouterr().err
    assert said.lower() in error.lower()
    assert len(error.strip().splitlines()) == 1, error
    assert not (steps_log.parent / "p.json").exists()


def test_what_is_missing_is_named(
    steps_log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = str(steps_log), str(tmp_path / "p.json")
    for args, said in [
        ([log, *logs.SERVER], "--columns"),
        ([log, "--columns", logs.STEPS, "--gpu", "h100"], "--model"),
        ([str(tmp_path / "none.csv"), "--columns", logs.STEPS, *logs.SERVER], "none.csv"),
    ]:
        assert main(["from-logs", *args, "--out", out]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.strip().splitlines()) == 1, error
    assert not Path(out).exists()


@pytest.fixture(scope="module")
def steps_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    return logs.steps_csv(logs.serve(folder, None, 40), folder / "s.csv")


def test_a_server_that_serves_none_of_the_load_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logs.requests_csv(logs.serve(tmp_path, None, 40), tmp_path / "r.csv")
    command = ["from-logs", str(log), *logs.SERVER, "--columns", logs.REQUESTS]
    command += ["--set", "engine.max_model_len=8", "--out", str(tmp_path / "p.json")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "completes none of its requests (context)" in error
    assert len(error.strip().splitlines()) == 1


# The entry in a profile.


@pytest.mark.parametrize(
    ("fit", "said"),
    [
        ({"scales": {"atention": 1}}, "unknown scale 'atention'"),
        ({"scales": {"linear": 0}}, "scale 'linear' must be"),
        ({"host": {"sync_us": "x"}}, "host constant 'sync_us' must be"),
        ({"frontend": {"name": "htp"}}, "unknown frontend 'htp'"),
        ({"frontend": {}}, "KeyError"),
        ({"scales": []}, "entry"),
    ],
)
def test_a_damaged_entry_is_named(fit: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(for_gpu(gpu("a100-80g")), path)
    data = json.loads(path.read_text())
    good = ServerFit({"linear": 1.1}).to_json()
    data["entries"].append({"op": "server", "key": {}, "fit": good | fit})
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=said) as caught:
        load(path)
    assert "p.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_servers_in_one_profile_are_refused(tmp_path: Path) -> None:
    base, path = for_gpu(gpu("a100-80g")), tmp_path / "p.json"
    once = logs.with_fit(base, ServerFit(), {})
    save(replace(base, entries=(*once, once[-1])), path)
    with pytest.raises(UserError, match="more than one entry 'server'"):
        load(path)


def test_constants_of_one_frontend_are_not_another_ones() -> None:
    from sim.cost.host import FRONTENDS

    fit = ServerFit(frontend={"delivery_us": 9e3}, frontend_name="http")
    assert fit.frontend_of("http").delivery_us == 9e3
    assert fit.frontend_of("network") == FRONTENDS["network"]


# The solver.


def line(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> Residuals:
    values = theta[0] + theta[1] + theta[2] * x - y
    group = np.zeros(len(x), dtype=np.int64)
    return Residuals(values, group, np.array([1e6]), np.array([1e-3]))


def test_solver_puts_back_what_two_parameters_both_do_and_resists_outliers() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(-1, 1, 400)
    y = 0.2 + 0.1 * x + 0.02 * rng.standard_normal(400)
    y[::40] += 3.0
    found = solve(
        lambda theta: line(theta, x, y),
        ["a", "b", "slope", "nothing"],
        np.full(4, 0.5),
        np.full(4, 2.0),
        np.full(4, 0.05),
        [False, False, False, False],
    )
    assert found.converged
    assert sum(found.fitted[:2].tolist()) == 1
    assert found.theta[:2].sum() == pytest.approx(0.2, abs=0.01)
    assert found.theta[2] == pytest.approx(0.1, abs=0.01)
    assert found.why_not[3] == "hardly shows in these records"
    assert any("not told apart" in w for w in found.why_not[:2])


def test_solver_stays_within_bounds_and_holds_what_it_is_told() -> None:
    x = np.linspace(-1, 1, 50)
    found = solve(
        lambda theta: line(theta, x, np.full(50, 5.0) + 0.3 * x),
        ["a", "b", "slope"],
        np.full(3, 0.5),
        np.full(3, 2.0),
        np.full(3, 0.05),
        [False, True, True],
    )
    assert found.theta.tolist() == [2.0, 0.0, 0.0]
    assert found.why_not[1:] == ("kept as asked", "kept as asked")
