"""`calibrate run` and the GPU check, as far as a CPU can try them."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
import torch

from calibrate import gpu_check
from calibrate.engine.executor import MeasuredStep
from calibrate.measure import run as calibrate_run
from calibrate.measure import traffic
from calibrate.measure.budget import seconds
from calibrate.measure.campaign import measure_points
from calibrate.measure.collectives import measure_collectives
from calibrate.measure.engine_run import calibration_of, levels_for, machine_state
from calibrate.measure.fit_points import FEWEST
from calibrate.measure.points import Limits, Point, kernel_points, limits_for
from calibrate.measure.probe import slowness
from calibrate.measure.step_fit import fit_steps, operator_errors
from calibrate.measure.store import PointStore
from calibrate.measure.traffic import VISIT_STEPS, Mix, run_traffic
from calibrate.timing import summarise
from sim.cost.interface import StepShape
from sim.cost.measured import measured_cost
from sim.cost.models import model
from sim.cost.profile import load
from sim.engine.config import EngineConfig
from sim.engine.executor import StepOutcome
from sim.errors import UserError


def calibrate(*args: str) -> int:
    parser = argparse.ArgumentParser()
    calibrate_run.add_arguments(parser)
    return calibrate_run.run(parser.parse_args(args))


def test_run_writes_a_profile_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("calibrate.measure.campaign.POINT_S", {"cpu": 0.01})
    out = tmp_path / "here.json.gz"
    args = ["--device", "cpu", "--model", "small-moe", "--budget", "6s", "--out", str(out)]
    assert calibrate(*args, "--csv", str(tmp_path)) == 0
    profile = load(out)
    assert {"gemm", "overhead", "engine"} <= {e.op for e in profile.entries}
    assert {"torch", "date", "peaks", "overheads_us", "noisy_points"} <= set(profile.meta)
    assert (tmp_path / "gemm.csv").read_text().startswith("dtype,m,n,k,us")
    lines = (tmp_path / "here.points.jsonl").read_text().splitlines()
    # Interrupted in the middle of a line: that point is measured again, the others are not.
    (tmp_path / "here.points.jsonl").write_text("\n".join(lines[:-1]) + '\n{"key": "ge')
    assert calibrate(*args, "--no-engine") == 0
    again = [json.loads(x) for x in (tmp_path / "here.points.jsonl").read_text().splitlines()]
    assert [json.loads(x) for x in lines[:-1]] == again[: len(lines) - 1]
    assert len({x.get("key") for x in again}) == len(again)


def test_a_budget_spent_at_once_still_measures_what_a_fit_needs(tmp_path):
    device = torch.device("cpu")
    points = kernel_points(model("small"), 1, "fp32", Limits(64, 128, 512))
    store = PointStore(tmp_path / "p.jsonl", {"device": "A"})
    measure_points(points, store, device, 0.0, lambda what, done: None)
    for op in {p.op for p in points}:
        of_op = [p for p in points if p.op == op]
        assert sum(p in store for p in of_op) >= min(FEWEST, len(of_op))
    assert len(store.rows) < len(points) / 2


def test_the_engine_entry_is_a_cost_model(tmp_path):
    out = tmp_path / "here.json"
    assert (
        calibrate("--device", "cpu", "--model", "small", "--budget", "6s", "--out", str(out)) == 0
    )
    cost = measured_cost(load(out), model("small"))
    run = cost.decode_run_ns(3, 300, 30000, 5)
    steps = [
        cost.step_ns(StepShape(3, 300 + 3 * i, 30000 + 600 * i + 3 * i * i, [], 3))
        for i in range(5)
    ]
    assert run.tolist() == steps
    with pytest.raises(UserError, match=r"no measured steps of Llama-3-8B \(it has: small\)"):
        measured_cost(load(out), model("llama-3-8b"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tp", "0"], "--tp must be at least 1"),
        (["--tp", "3", "--device", "cpu"], "--tp 3 does not divide"),
        (["--out", "/nowhere/p.json"], "its folder does not exist"),
        (["--device", "cuda:99"], "device cuda:99"),
        (["--budget", "0s", "--device", "cpu"], "a budget is a time"),
    ],
)
def test_run_mistakes_are_one_line(tmp_path, args, message):
    given = ["--model", "small", "--out", str(tmp_path / "p.json"), *args]
    with pytest.raises(UserError) as caught:
        calibrate(*given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_points_of_another_device_are_refused(tmp_path):
    path = tmp_path / "p.points.jsonl"
    here = {"device": "A", "torch": "2", "triton": "3"}
    store = PointStore(path, here)
    point = Point.of("gemm", dtype="bf16", m=1, n=2, k=3)
    store.add(point, summarise([1.0] * 9, "cpu", "clock"), "onednn")
    assert point in PointStore(path, here)
    with pytest.raises(UserError, match="measured with device A, this is B"):
        PointStore(path, {**here, "device": "B"})
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.raises(UserError, match=r"jsonl:3: not a measured point"):
        PointStore(path, here)


def test_points_cover_every_operator_from_the_start():
    shape = model("Qwen3-30B-A3B")
    points = kernel_points(shape, 1, "bf16", limits_for("cuda", shape))
    assert {p.op for p in points[:8]} == {
        "gemm", "attn_prefill", "attn_decode", "moe", "elementwise",
    }  # fmt: skip
    assert len({p.key for p in points}) == len(points)
    assert len(points) < 200
    small = kernel_points(shape, 4, "bf16", Limits(64, 128, 512))
    assert all(p["heads"] == 8 for p in small if p.op == "attn_decode")
    assert max(p["m"] for p in small if p.op == "gemm") == 64


def test_step_fit_recovers_a_known_engine():
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(300):
        n, context = int(rng.integers(1, 20)), int(rng.integers(50, 5000))
        prefills = [(int(rng.integers(1, 400)), 0)] if rng.random() < 0.2 else []
        shape = StepShape(n, context, context * context // n, prefills, n)
        q = sum(x for x, _ in prefills)
        us = {
            "qkv": 200 + 3.0 * (n + q), "attention_decode": 50 + 10 * n + 0.2 * context,
            "attention_prefill": 30 + 0.01 * q * q / 2 if prefills else 0, "lm_head": 40 + 5 * n,
            "prepare": 100 + 4 * (n + len(prefills)),
        }  # fmt: skip
        operators = {k: round(v * 1e3 * rng.normal(1, 0.02)) for k, v in us.items()}
        total = sum(operators.values())
        steps.append(MeasuredStep(shape, total, total, 0, operators, ()))
    errors = operator_errors(fit_steps(steps[:200]), steps[200:])
    assert errors["step"].median < 0.02
    assert abs(errors["step"].bias) < 0.01
    assert errors["attention_prefill"].median < 0.1


def test_step_fit_of_decode_graphs():
    rng = np.random.default_rng(1)
    steps = []
    for i in range(300):
        n, context = int(rng.integers(1, 64)), int(rng.integers(1000, 50_000))
        q = int(rng.integers(50, 500)) if i % 3 == 0 else 0
        shape = StepShape(n, context, context * context // n, [(q, 0)] if q else [], n)
        if q:
            us = {"qkv": 900 + 2.0 * (n + q), "attention_decode": 300 + 5 * n + 0.01 * context,
                  "attention_prefill": 40 + 0.5 * q, "lm_head": 60 + n}  # fmt: skip
        else:
            us = {"graph": 500 + 4.0 * n + 0.01 * context, "sample": 30 + 0.5 * n}
        operators = {k: round(v * 1e3) for k, v in (us | {"prepare": 200}).items()}
        total = sum(operators.values())
        steps.append(MeasuredStep(shape, total, total, 0, operators, ()))
    fit = fit_steps(steps)
    assert fit.graph is not None
    assert operator_errors(fit, steps)["step"].p90 < 0.03
    from sim.cost.measured import StepFit

    again = StepFit.from_json(json.loads(json.dumps(fit.to_json())))
    assert again == fit


def test_slowness_smooths_single_outliers():
    assert slowness([10, 10, 50, 10, 10, 20, 20, 20, 20], 10).tolist() == [1] * 4 + [2] * 5


def test_collectives_between_processes():
    rows = measure_collectives(2, "cpu", sizes=(256, 4096))
    assert {(r["op"], r["bytes"]) for r in rows} >= {("all_reduce", 256), ("all_gather", 4096)}
    assert all(r["us"] > 0 and r["world"] == 2 for r in rows)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="needs 2 GPUs"):
            measure_collectives(2)


def test_budgets():
    assert [seconds(t) for t in ("90s", "5m", "1h", "2.5", " 3 s ")] == [90, 300, 3600, 2.5, 3]
    for wrong in ("", "0", "-3s", "5 days"):
        with pytest.raises(UserError):
            seconds(wrong)


def test_gpu_check_runs_its_comparisons_on_a_cpu(tmp_path, capsys):
    code = gpu_check.main(
        ["--device", "cpu", "--out", str(tmp_path), "--skip", "tests,run,validate"]
    )
    page = (tmp_path / "gpu_check.md").read_text()
    assert code == 0
    assert "fused MoE against torch's grouped matrix product" in page
    assert "## validate engine\n\nLeft out." in page
    assert page in capsys.readouterr().out
    assert gpu_check.main(["--skip", "everything"]) == 2
    if not torch.cuda.is_available():
        assert gpu_check.main(["--out", str(tmp_path)]) == 2
        assert "use --device cpu" in capsys.readouterr().err


def test_warm_up_leaves_nothing_behind():
    from calibrate.engine.executor import RealExecutor
    from calibrate.engine.llm import make_runner
    from calibrate.engine.tokens import TraceTokens
    from calibrate.measure.traffic import warm_up
    from sim.engine.config import EngineConfig
    from tests.real_engine.models import MODELS, weights

    config = EngineConfig(
        max_model_len=128, num_gpu_blocks=40, max_num_seqs=4, max_num_batched_tokens=64,
        async_scheduling=False,
    )  # fmt: skip
    arch = MODELS["llama"]
    executor = RealExecutor(make_runner(arch, weights(arch), config, TraceTokens(199)), config)
    warm_up(executor, config)
    assert executor.steps == []
    assert not executor.runner.texts


class SlowPrefills:
    """An executor on a clock of its own, for which a chunk lasts as long as 100 decodes."""

    def __init__(self, config):
        from types import SimpleNamespace

        self.config, self.now, self.steps = config, 0, []
        weights = SimpleNamespace(device=torch.device("cpu"))
        self.runner = SimpleNamespace(decoder=SimpleNamespace(weights=weights), texts={})

    def execute(self, plan, shape):
        ns = 400_000_000 if shape.prefills else 4_000_000
        self.now += ns
        self.steps.append(MeasuredStep(shape, ns, ns, 0, {}, ()))
        return StepOutcome((ns,), [int(s) for s in plan.samples])


@pytest.mark.parametrize("blocks", [1025, 60])  # 60: too few for the higher levels
def test_traffic_visits_every_level_however_slow_prefills_are(monkeypatch, blocks):
    config = EngineConfig(
        max_model_len=512, max_num_batched_tokens=512, max_num_seqs=16, num_gpu_blocks=blocks,
        async_scheduling=False,
    )  # fmt: skip
    executor = SlowPrefills(config)
    monkeypatch.setattr(traffic, "work_clock", lambda device: lambda: executor.now)
    budget_s = 40.0
    steps = run_traffic(
        executor, config, Mix(prompt_max=400), levels=levels_for(config), budget_s=budget_s
    )
    assert sum(s.ns for s in steps) < budget_s * 1e9
    alone = [s.shape.num_decodes for s in steps if not s.shape.prefills]
    # Decodes take a small part of the time, and still every size was met, the lowest most often.
    visited = levels_for(config) if blocks == 1025 else [1, 2, 3]
    assert all(alone.count(n) >= VISIT_STEPS for n in visited)
    assert alone.count(1) > 5 * VISIT_STEPS
    assert {1, 2, 3, 4} <= set(alone[: len(alone) // 2]) & set(alone[len(alone) // 2 :])


def test_a_budget_too_short_for_a_fit_is_overrun(monkeypatch):
    config = EngineConfig(
        max_model_len=512, max_num_batched_tokens=512, max_num_seqs=4, num_gpu_blocks=1025,
        async_scheduling=False,
    )  # fmt: skip
    executor = SlowPrefills(config)
    monkeypatch.setattr(traffic, "work_clock", lambda device: lambda: executor.now)
    run = {"config": config, "mix": Mix(prompt_max=400), "levels": levels_for(config)}
    enough = run_traffic(executor, budget_s=1.0, **run)
    assert len(enough) == traffic.FEWEST_STEPS
    assert sum(s.ns for s in enough) > 1e9
    executor = SlowPrefills(config)
    few = run_traffic(executor, budget_s=0.1, **run)
    assert len(few) < traffic.FEWEST_STEPS
    with pytest.raises(UserError, match=r"for \d+ steps only, and 40 are needed"):
        calibration_of(few)


def test_drift_is_told_apart_from_cost_and_by_kind_of_step():
    rng = np.random.default_rng(2)
    steps = []
    for i in range(600):
        slow = 1.3 if i // 60 % 2 else 1.0
        # Small batches were mostly met while the machine was slow.
        small = rng.random() < (0.8 if slow > 1 else 0.2)
        n = 1 if small else int(rng.integers(2, 12))
        prefills = [(int(rng.integers(20, 400)), 0)] if i % 5 == 0 else []
        q = sum(x for x, _ in prefills)
        us = {"qkv": 2000 + 600.0 * (n + q), "attention_decode": 300.0 * n,
              "attention_prefill": 2.0 * q, "lm_head": 400.0 * n}  # fmt: skip
        factor = slow ** (0.5 if prefills else 1.2) * rng.normal(1, 0.01)
        operators = {k: round(v * 1e3 * factor) for k, v in us.items()}
        total = sum(operators.values())
        shape = StepShape(n, 100 * n, 10_000 * n, prefills, n)
        steps.append(MeasuredStep(shape, total, total, round(2e6 * slow), operators, ()))
    machine = machine_state(steps)
    assert machine.sensitivity == pytest.approx(1.2, abs=0.1)
    assert machine.chunk_sensitivity == pytest.approx(0.5, abs=0.1)
    found = machine.speed(steps)
    assert machine.stretch(1.3, steps[1].shape) == pytest.approx(1.3**machine.sensitivity)
    assert found[61] / found[1] == pytest.approx(1.3**machine.sensitivity)
    errors = operator_errors(fit_steps(steps, found), steps, found)
    assert errors["step"].median < 0.03


def test_an_engine_entry_of_another_version_is_refused():
    from calibrate.measure.engine_profile import make_profile, read_engine
    from sim.cost.profile import Entry

    shape = model("Llama-3-8B")
    machine = {"probe_ns": 1.0, "sensitivity": 1.0, "probe_spread": 0.1}
    entry = Entry("engine", {"model": shape.name, "machine": machine}, {})
    profile = make_profile({"device": "cpu", "date": "2026-11-29"}, [entry])
    with pytest.raises(UserError, match=r"made by another version .*calibrate run --model"):
        read_engine(profile, shape, "cpu")
