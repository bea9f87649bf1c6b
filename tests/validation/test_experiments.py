"""Reading published deployments, and regenerating their load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.validation.deployment import deployment, model_shape
from calibrate.validation.experiments import (
    ReplayLoad,
    SharedPrefixLoad,
    load_experiments,
    select,
    stated_bool,
    stated_int,
)
from calibrate.validation.measured import measured_values
from calibrate.validation.runs import predict
from calibrate.validation.workloads import regenerate
from sim.errors import UserError


def entry(**changes: Any) -> dict[str, Any]:
    """One experiment with the fields the reader needs."""
    given: dict[str, Any] = {
        "id": "is-tiny",
        "split": "open",
        "regime": "stable",
        "model": {"hf": "meta-llama/Llama-3.1-8B", "moe": None},
        "gpu": "H100-80GB-SXM",
        "tp": 1,
        "engine": {
            "version": "0.15.1 (a remark)",
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 128,
            "max_model_len": 4096,
        },
        "kv_blocks": 1000,
        "workload": {
            "kind": "inference-perf shared_prefix",
            "stages": [
                {"rate_rps": 20, "duration_s": 12, "num_requests": 240},
                {"rate_rps": 40, "duration_s": 6, "num_requests": 240},
            ],
            "arrival": "Poisson",
            "prompts": {
                "groups": 10,
                "prompts_per_group": 10,
                "system_prompt_tokens": 100,
                "question_tokens": 100,
                "observed_prompt_len": {"mean": 210, "min": 200, "p50": 210, "max": 220},
            },
            "output": {"tokens_per_request": 20},
            "client": {"timeout_s": 300},
        },
        "measured": "held out",
    }
    given.update(changes)
    return given


def write(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "experiments.json"
    path.write_text(json.dumps({"experiments": list(entries)}))
    return path


def test_remarks_state_numbers_or_nothing() -> None:
    assert stated_int("not stated (2048 in fig 6/7 logs)") == 2048
    assert stated_int("vLLM default, not stated") is None
    assert stated_int("model maximum", 5) == 5
    assert stated_int(128) == 128
    assert stated_bool("not stated (True in every raw log of the artifact)", False)
    assert stated_bool("not stated", True)


def test_load_repeats_100_prompts_in_one_order_and_fills_each_stage(tmp_path: Path) -> None:
    (experiment,) = load_experiments(write(tmp_path, entry()))
    load = regenerate(experiment, seed=0)
    first, second = load.stages
    assert load.num_requests == 480
    assert first.offsets_ns[-1] == 12 * 10**9
    assert second.offsets_ns[-1] == 6 * 10**9
    assert 1e9 <= second.pause_ns <= 3e9
    assert sorted(first.prompts[:100].tolist()) == list(range(100))
    assert (first.prompts[100:200] == first.prompts[:100]).all()
    assert (second.prompts == first.prompts).all()
    lengths = [sum(s.length for s in prompt) for prompt in load.prompts]
    assert min(lengths) >= 200
    assert max(lengths) <= 220
    # Ten prompts share each system prompt, and nothing else.
    assert len({prompt[0] for prompt in load.prompts}) == 10
    assert len({prompt[1].content for prompt in load.prompts}) == 100


def test_load_depends_on_seed_and_experiment_only(tmp_path: Path) -> None:
    one, other = load_experiments(write(tmp_path, entry(), entry(id="is-other")))
    assert (
        regenerate(one, 1).stages[0].offsets_ns == regenerate(one, 1).stages[0].offsets_ns
    ).all()
    assert (
        regenerate(one, 1).stages[0].offsets_ns != regenerate(one, 2).stages[0].offsets_ns
    ).any()
    assert (
        regenerate(one, 1).stages[0].offsets_ns != regenerate(other, 1).stages[0].offsets_ns
    ).any()


def test_replay_repeats_the_prefix_hits_of_the_file(tmp_path: Path) -> None:
    rows = ["0,10.5,100,5,0", "1,20.5,40,6,0", "2,30.5,120,7,96", "3,40.5,33,8,32"]
    head = "idx,arrival_ms,input_tokens,output_tokens,prefix_hit_tokens_ideal"
    (tmp_path / "rows.csv").write_text("\n".join([head, *rows]))
    work = {"kind": "trace", "file": "rows.csv"}
    (experiment,) = load_experiments(write(tmp_path, entry(workload=work)))
    assert isinstance(experiment.workload, ReplayLoad)
    load = regenerate(experiment, 0)
    assert load.stages[0].offsets_ns.tolist() == [0, 10_000_000, 20_000_000, 30_000_000]
    a, b, c, d = load.prompts
    assert c[0] == a[0]._replace(length=96)
    assert d[0] == b[0]._replace(length=32)
    assert [sum(s.length for s in p) for p in load.prompts] == [100, 40, 120, 33]


def test_server_is_filled_by_rules(tmp_path: Path) -> None:
    old = entry(id="a", kv_blocks=None)
    old["engine"] = {**old["engine"], "version": "0.11.0", "max_num_batched_tokens": "not stated"}
    new = entry(id="b")
    sibling = entry(id="c", kv_blocks=None)
    experiments = load_experiments(write(tmp_path, old, new, sibling))
    a, b, c = (deployment(e, experiments) for e in experiments)
    assert not a.engine.async_scheduling
    assert b.engine.async_scheduling
    assert a.engine.max_num_batched_tokens == 8192
    assert (a.kv_blocks_from, b.kv_blocks_from, c.kv_blocks_from) == (
        "computed",
        "stated",
        "sibling",
    )
    assert c.engine.num_gpu_blocks == 1000


def test_unknown_model_comes_from_the_entry() -> None:
    fields = {
        "hf": "nobody/New-7B",
        "layers": 30,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 11008,
        "vocab": 50000,
        "moe": {"experts": 8, "topk": 2, "shared": 0, "expert_intermediate": 1024},
        "weights_dtype": "bf16",
    }
    shape = model_shape(fields)
    assert shape.name == "New-7B"
    assert shape.moe is not None
    assert shape.moe.intermediate == 1024
    del fields["layers"]
    with pytest.raises(UserError, match="layers"):
        model_shape(fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "no list of experiments"),
        ('{"experiments": [3]}', "number 0 is not an object"),
        ('{"experiments": [{"id": "x"}]}', "experiment x: field 'engine' is missing"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_experiments(path)


def test_select_by_pattern(tmp_path: Path) -> None:
    experiments = load_experiments(write(tmp_path, entry(id="a1"), entry(id="a2"), entry(id="b")))
    assert [e.id for e in select(experiments, "^a", 1)] == ["a1"]
    with pytest.raises(UserError, match="matches none"):
        select(experiments, "zzz", None)
    with pytest.raises(UserError, match="regular expression"):
        select(experiments, "(", None)


@pytest.mark.shared
def test_every_published_experiment_is_understood(shared_dir: Path) -> None:
    experiments = load_experiments(shared_dir / "ground_truth" / "experiments_open.json")
    assert len(experiments) == 78
    for experiment in experiments:
        server = deployment(experiment, experiments)
        assert server.engine.num_blocks > 1000
        load = regenerate(experiment, 0)
        assert load.num_requests > 0
        work = experiment.workload
        if isinstance(work, SharedPrefixLoad):
            assert load.num_requests == sum(s.num_requests for s in work.stages)
            lengths = [sum(s.length for s in p) for p in load.prompts]
            if work.lengths:
                assert np.mean(lengths) == pytest.approx(work.lengths.mean, rel=0.01)
        assert bool(measured_values(experiment)) == (experiment.split == "open")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": -1}, "tp must be a whole number"),
        ({"model": {"hf": ""}}, "model.hf must be a name"),
        ({"model": {"hf": "x", "layers": 1.5}}, "model.layers must be a whole number"),
        ({"kv_blocks": -3}, "an engine argument must be a whole number"),
        ({"engine": []}, "engine must be an object"),
        ({"workload": {"kind": "dance"}}, "workload kind 'dance' is not known"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"experiment is-tiny: {message}"):
        load_experiments(write(tmp_path, entry(**changes)))


def test_what_cannot_be_simulated_names_the_experiment(tmp_path: Path) -> None:
    (experiment,) = load_experiments(write(tmp_path, entry(gpu="H1000", kv_blocks=None)))
    with pytest.raises(UserError, match="experiment is-tiny: unknown GPU 'H1000'"):
        predict(experiment)
