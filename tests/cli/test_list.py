"""`simulate --list`: what it prints works, and nothing that works is missing."""

from __future__ import annotations

import re

import pytest

from sim.cli import main
from sim.cost.hardware import catalogue as gpus
from sim.cost.hardware import gpu
from sim.cost.models import catalogue as models
from sim.cost.models import model
from sim.errors import UserError
from sim.listing import KINDS, listing
from sim.registry import POLICIES, policy_class
from sim.scenario import Scenario
from sim.tree import set_text


def names(kind: str) -> list[str]:
    """The first word of each entry: lines with an indent of two."""
    return re.findall(r"^  (\S+)", listing(kind), flags=re.MULTILINE)


def aliases(kind: str) -> list[str]:
    entries = re.split(r"\n  (?=\S)", listing(kind))
    flat = [" ".join(entry.split()) for entry in entries[1:]]
    return [a for entry in flat for a in entry.partition(" also ")[2].split(", ") if a]


def test_models_and_gpus_are_the_catalogues_with_their_aliases() -> None:
    assert names("models") == list(models())
    assert names("gpus") == names("profiles") == list(gpus())
    for alias in aliases("models"):
        assert model(alias).name in models()
    for alias in aliases("gpus"):
        assert gpu(alias).name in gpus()
    assert "NVIDIA H100 80GB HBM3" in aliases("gpus")
    assert "Meta-Llama-3-8B" in listing("models")


@pytest.mark.parametrize("kind", ["policies", "eviction", "admission", "routing"])
def test_policies_are_those_of_the_registry_described_by_their_docstrings(kind: str) -> None:
    registered = POLICIES["scheduling" if kind == "policies" else kind]
    assert names(kind) == list(registered)
    flat = " ".join(listing(kind).split())
    for name in registered:
        doc = policy_class("scheduling" if kind == "policies" else kind, name).__doc__ or ""
        assert " ".join(doc.split())[:40] in flat


def test_every_field_can_be_set_to_what_is_printed() -> None:
    """And all fields of a scenario are there, those of its sections too."""
    shown = names("fields")
    for setting in shown:
        tree: dict[str, object] = {"trace": "t.csv"}
        if setting.startswith(("trace", "generate")):
            continue  # they name files and workloads
        set_text(tree, setting)
        Scenario.from_dict(tree)
    paths = {setting.split("=")[0] for setting in shown}
    for name, value in Scenario.of(trace="t.csv", engine={}).to_dict().items():
        if name in ("policy", "eviction", "admission", "routing", "engine"):
            continue
        inner = {f"{name}.{key}" for key in value} if isinstance(value, dict) else {name}
        assert inner <= paths
    with pytest.raises(UserError):
        Scenario.from_dict({"engine": {"policy": "fcfs"}})  # so the list leaves it out
    assert "engine.policy" not in paths


def test_without_a_kind_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert out == "\n\n".join(listing(kind) for kind in KINDS) + "\n"
    assert all(len(line) <= 110 for line in out.splitlines())
    assert not re.search(r"\de[+-]\d", out)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--list", "modells"], "unknown kind of name 'modells'; did you mean 'models'?"),
        (["--list", "gpus", "--json"], "--list only prints what can be named: leave out --json"),
        (["--list", "--trace", "a.csv"], "leave out --trace"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
