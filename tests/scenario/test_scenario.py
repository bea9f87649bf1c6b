"""The scenario tree: what comes in, what goes out, and what a mistake is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.errors import UserError
from sim.scenario import PolicyChoice, Scenario
from sim.tree import read_yaml, set_path

FULL: dict[str, Any] = {
    "model": "Mixtral-8x7B",
    "gpu": "h100",
    "cost": {"profile": None, "engine_version": "0.15.1", "frontend": "none", "host_zero": True},
    "policy": {"name": "static", "reserve": "declared"},
    "admission": {"name": "queue-limit", "max_requests": 64},
    "routing": "least-requests",
    "engine": {"tensor_parallel_size": 2, "max_num_seqs": 64, "cudagraph_capture_sizes": [1, 2]},
    "cluster": {"replicas": 3},
    "trace": {"path": "a.csv", "columns": {"arrival": "ts"}, "skip_bad_rows": True},
    "limit": 10,
    "start_s": 1.5,
    "rate_scale": 2,
    "client": {"timeout_s": 300},
    "slo": {"ttft_s": 1, "tpot_s": 0.05},
    "warm_up_s": 10,
    "horizon_s": 1000,
    "seed": 3,
    "fast_forward": False,
}


def test_yaml_round_trip_keeps_every_field() -> None:
    scenario = Scenario.from_dict(FULL)
    again = Scenario.from_dict(yaml.safe_load(scenario.to_yaml()))
    assert again == scenario
    assert again.policy == PolicyChoice("static", {"reserve": "declared"})
    assert again.engine["cudagraph_capture_sizes"] == (1, 2)
    assert again.slo.given()


def test_defaults_are_llama_on_an_a100() -> None:
    scenario = Scenario()
    assert (scenario.model, scenario.gpu, scenario.policy.name) == (
        "Llama-3-8B",
        "A100-80G",
        "chunked",
    )
    assert Scenario.from_dict({}) == scenario
    assert Scenario.from_dict(scenario.to_dict()) == scenario


def test_with_changes_single_fields_and_leaves_the_original() -> None:
    before = Scenario.from_dict(FULL)
    after = before.with_({"engine.max_num_seqs": 8, "slo.e2e_s": 20.0, "policy.reserve": "max"})
    assert after.engine["max_num_seqs"] == 8
    assert after.engine["tensor_parallel_size"] == 2
    assert after.policy.options == {"reserve": "max"}
    assert before.engine["max_num_seqs"] == 64
    assert before == Scenario.from_dict(FULL)


def test_naming_a_policy_forgets_the_options_of_the_one_before() -> None:
    changed = Scenario.from_dict(FULL).with_({"policy": "chunked"})
    assert changed.policy == PolicyChoice("chunked")


def test_an_option_of_a_policy_that_was_not_named_goes_to_the_default() -> None:
    tree: dict[str, Any] = {"admission": "queue-limit"}
    set_path(tree, "admission.max_requests", 5)
    set_path(tree, "routing.something", 1)
    assert tree["admission"] == {"name": "queue-limit", "max_requests": 5}
    assert tree["routing"] == {"name": "round-robin", "something": 1}


@pytest.mark.parametrize("text", ["1e6", "1000000.0"])
def test_whole_numbers_may_be_written_as_floats(text: str) -> None:
    scenario = Scenario.from_dict({"limit": yaml.safe_load(text)})
    assert scenario.limit == 1_000_000
    assert isinstance(scenario.limit, int)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": "x"}, "unknown scenario field 'modle'; did you mean 'model'"),
        ({"engine": {"max_num_seq": 1}}, "unknown field of engine .*did you mean 'max_num_seqs'"),
        ({"engine": {"max_num_seqs": "many"}}, r"engine\.max_num_seqs must be a whole number"),
        ({"engine": {"policy": "priority"}}, "--policy"),
        ({"engine": 3}, "engine must be a mapping"),
        ({"slo": {"ttft": 1}}, "unknown field of slo 'ttft'; did you mean 'ttft_s'"),
        ({"slo": {"ttft_s": -1}}, r"slo\.ttft_s must be positive"),
        ({"slo": {"ttft_s": "fast"}}, r"slo\.ttft_s must be a number"),
        ({"cluster": {"replicas": 0}}, r"cluster\.replicas must be at least 1"),
        ({"cluster": {"replicas": 1.5}}, r"cluster\.replicas must be a whole number"),
        ({"cluster": "two"}, "cluster must be a mapping"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"rate_scale": 0}, "rate_scale must be positive"),
        ({"rate_scale": float("nan")}, "rate_scale must be a number"),
        ({"rate_scale": float("inf")}, "rate_scale must be positive"),
        ({"warm_up_s": -1}, "warm_up_s"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed must be a whole number"),
        ({"fast_forward": "no"}, "fast_forward must be true or false"),
        ({"policy": 3}, "policy must be a policy's name"),
        ({"trace": "a.csv", "generate": "poisson:rate=1"}, "not both"),
        ({"trace": {"file": "a.csv"}}, "unknown field of trace"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Scenario.from_dict(values)


@pytest.mark.parametrize("path", ["model.name", "limit.x", "", ".", "engine..x", "generate.rate"])
def test_paths_that_lead_nowhere(path: str) -> None:
    tree: dict[str, Any] = {"model": "m", "limit": 1, "generate": "poisson:rate=1"}
    with pytest.raises(UserError, match="cannot set"):
        set_path(tree, path, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: [", "not valid YAML"),
        (b"- a\n- b\n", "a scenario is a mapping"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"just text", "a scenario is a mapping"),
    ],
)
def test_unreadable_scenario_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        Scenario.load(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_missing_scenario_file() -> None:
    with pytest.raises(UserError, match="cannot be read"):
        Scenario.load("/nowhere/scenario.yaml")


def test_an_empty_file_is_the_default_scenario(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("# nothing\n")
    assert Scenario.load(file) == Scenario()


def test_a_relative_trace_is_relative_to_the_scenario_file(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("trace: traces/a.csv\n")
    assert read_yaml(file)["trace"] == str(tmp_path / "traces" / "a.csv")
    file.write_text("trace: {path: /abs/a.csv, format: azure}\n")
    assert Scenario.load(file).trace is not None
    assert Scenario.load(file).trace.path == "/abs/a.csv"  # type: ignore[union-attr]
