"""The twin against the real engine, on this machine: equal decisions, and errors within bounds.

Times are the engine thread's own CPU time, so that neighbours on the machine disturb little; the
bounds are three times what a quiet machine reaches.
"""

from __future__ import annotations

import json

import pytest

from calibrate.engine.closed_loop import Modelled, Scripted, VirtualTime, serve
from calibrate.engine.executor import OutOfMemory, RealExecutor
from calibrate.engine.llm import make_runner
from calibrate.engine.tokens import TraceTokens
from calibrate.validation import engine
from sim.cost.measured import MeasuredCost, StepFit
from sim.engine.config import EngineConfig
from sim.engine.interface import Status
from sim.errors import UserError
from sim.request import Request
from tests.real_engine.models import MODELS, weights

LIMITS = {"step_median": 0.30, "tpot_mean": 0.21, "ttft_mean": 0.30}


def validate(*args: str):
    import argparse

    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    return engine.run(parser.parse_args(args))


@pytest.mark.quiet
@pytest.mark.parametrize("model", ["small", "small-moe"])
def test_closed_loop_on_the_cpu(capsys, tmp_path, model):
    profile = tmp_path / "here.json"
    worst = {}
    # The machine may be disturbed; a wrong model is wrong every time.
    for attempt in range(3):
        args = ["--model", model, "--budget", "6s", "--limit", "30", "--json"]
        assert validate(*args, "--seed", str(attempt), "--out", str(profile)) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["decisions_equal"] is True
        assert set(found["raw"]) >= set(LIMITS)
        assert {"step", "probe", "drift", "interrupted"} <= set(found["noise"])
        assert {"decode", "prefill", "mixed"} >= set(found["kinds"]) > set()
        worst = {k: found["normalised"][k] for k in LIMITS if found["normalised"][k] > LIMITS[k]}
        if not worst:
            break
    assert not worst
    assert profile.is_file()


def test_wall_clock_has_no_probe_and_nothing_normalised(capsys, tmp_path):
    profile = tmp_path / "here.json"
    args = ["--budget", "3s", "--limit", "6", "--json"]
    assert validate(*args, "--out", str(profile)) == 0
    capsys.readouterr()
    assert validate(*args, "--profile", str(profile), "--wall-clock") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["decisions_equal"] is True
    assert found["normalised"] is None
    assert found["clock"] == "wall"
    assert 0 < found["kinds"]["decode"]["median"] < 1


def requests(count: int, prompt: int = 30, output: int = 6) -> list[Request]:
    return [Request(i, str(i), i * 1000, prompt + i, output) for i in range(count)]


def small_config(**settings: object) -> EngineConfig:
    defaults = {"max_model_len": 128, "block_size": 8, "num_gpu_blocks": 40, "max_num_seqs": 8,
                "max_num_batched_tokens": 32, "async_scheduling": False}  # fmt: skip
    return EngineConfig(**{**defaults, **settings})


def flat_cost(step_us: float = 100.0) -> MeasuredCost:
    one = {"knots": [1.0], "values": [0.0]}
    fit = StepFit.from_json(
        {
            "linear": {"knots": [1.0, 2.0], "values": [step_us, step_us + 1]}, "moe": one,
            "graph": None, "head": one, "decode_calls": one, "decode_context": one,
            "decode_mixed": 1.0,
            "chunk": dict.fromkeys(
                ("call", "token", "square", "prefix_call", "pair", "gather"), 0.0
            ),
            "host_step": 0.0, "host_per_seq": 0.0,
        }
    )  # fmt: skip
    return MeasuredCost(fit, {})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_real_executor_changes_nothing_but_durations(asynchronous):
    arch = MODELS["llama"]
    config = small_config(async_scheduling=asynchronous)
    executor = RealExecutor(make_runner(arch, weights(arch), config, TraceTokens(199)), config)
    real = serve(requests(8, output=20), config, flat_cost(), executor)
    again = serve(
        requests(8, output=20), config, flat_cost(), Scripted([s.ns for s in executor.steps])
    )
    assert real.decisions == again.decisions
    assert real.records == again.records
    assert sum(r.preemptions for r in real.records) > 0
    assert all(r.status is Status.COMPLETED for r in real.records)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_speculation_with_the_real_executor_serves_everything(asynchronous):
    arch = MODELS["llama"]
    config = small_config(
        num_speculative_tokens=2, spec_method="draft_model", num_gpu_blocks=60,
        async_scheduling=asynchronous, max_num_batched_tokens=48,
    )  # fmt: skip
    made = weights(arch)
    runner = make_runner(arch, made, config, TraceTokens(199), draft=(arch, made))
    served = serve(requests(6, output=12), config, flat_cost(), RealExecutor(runner, config))
    assert [r.output_tokens for r in served.records] == [12] * 6


def test_out_of_memory_ends_the_run_with_the_results_so_far():
    arch = MODELS["llama"]
    config = small_config()
    executor = RealExecutor(make_runner(arch, weights(arch), config, TraceTokens(199)), config)
    run = executor.runner.run

    def scarce(plan, recorder=None):
        if len(executor.steps) == 6:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return run(plan, recorder)

    executor.runner.run = scarce
    late = [*requests(2, output=2), Request(2, "2", 10**12, 30, 20)]
    served = serve(late, config, flat_cost(), executor)
    assert "out of memory on cpu in step 6: weights" in served.failure
    assert [r.status for r in served.records] == [Status.COMPLETED] * 2 + [Status.UNFINISHED]
    assert issubclass(OutOfMemory, UserError)


def test_drift_stretches_the_simulation():
    config = small_config()
    time = VirtualTime()
    slow = Modelled(flat_cost(), time, lambda now, shape: 2.0)
    plain = serve(requests(1), config, flat_cost(), Modelled(flat_cost(), VirtualTime()))
    stretched = serve(requests(1), config, flat_cost(), slow, time)
    ratio = stretched.records[0].finish_ns / plain.records[0].finish_ns
    assert ratio == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--model", "smal"], "did you mean 'small'"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--load", "1.5"], "--load must be between 0 and 1"),
        (["--budget", "soon"], "a budget is a time such as 90s"),
        (["--dtype", "int3"], "unknown dtype 'int3'"),
        (["--set", "engine.max_num_seq=3"], "did you mean 'max_num_seqs'"),
        (["--set", "engine.num_speculative_tokens=2"], "without speculation"),
        (["--set", "policy=3"], "--set takes engine.NAME=VALUE"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
        (["--model", "llama-3-70b"], "GB of weights"),
        (["--out", "/nowhere/profile.json"], "its folder does not exist"),
    ],
)
def test_mistakes_are_one_line(args, message):
    with pytest.raises(UserError) as caught:
        validate(*args)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_profile_of_another_machine_is_refused(tmp_path):
    from calibrate.measure.engine_profile import make_profile
    from sim.cost.profile import save

    path = tmp_path / "other.json"
    save(make_profile({"device": "H100-SXM", "date": "2026-11-29", "kind": "cuda"}, []), path)
    with pytest.raises(UserError, match=r"profile is for H100-SXM, this machine has"):
        validate("--profile", str(path))
