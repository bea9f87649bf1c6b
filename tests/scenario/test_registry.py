"""Names of policies, options, and a user's own classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import UserError
from sim.registry import POLICIES, make_policy, policy_class

OWN = """
from dataclasses import dataclass
from sim.protocols import AdmissionPolicy, RoutingPolicy, SchedulingPolicy

@dataclass
class Last(RoutingPolicy):
    back: int = 1

    def choose(self, request, view):
        return len(view.replicas) - self.back

class Plain(AdmissionPolicy):
    pass

class Unrelated:
    pass
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, table in POLICIES.items() for name in table]
)
def test_every_name_has_a_class_and_default_options(kind: str, name: str) -> None:
    assert type(make_policy(kind, name, {})) is policy_class(kind, name)
    assert policy_class(kind, name) is policy_class(kind, name.upper().replace("-", "_"))
    assert policy_class(kind, name).__doc__


def test_options_are_the_dataclass_fields() -> None:
    assert make_policy("admission", "queue-limit", {"max_requests": 3}).max_requests == 3
    assert make_policy("scheduling", "static", {"reserve": "declared"}).reserve == "declared"


def test_own_class_from_a_file(own_file: Path) -> None:
    policy = make_policy("routing", f"{own_file}:Last", {"back": 2})
    assert policy.back == 2
    assert make_policy("admission", f"{own_file}:Plain", {}) is not None


def test_own_class_is_read_anew_each_time(own_file: Path) -> None:
    assert make_policy("routing", f"{own_file}:Last", {}).back == 1
    own_file.write_text(OWN.replace("back: int = 1", "back: int = 7"))
    assert make_policy("routing", f"{own_file}:Last", {}).back == 7


def test_own_class_from_a_module_in_the_current_folder(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_file.rename(own_file.with_name("own_module_of_a_user.py"))
    monkeypatch.chdir(own_file.parent)
    assert make_policy("routing", "own_module_of_a_user:Last", {}).back == 1


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("scheduling", "chunkd", {}, "did you mean 'chunked'"),
        ("scheduling", "static", {"reserv": "max"}, "did you mean 'reserve'"),
        ("scheduling", "static", {"reserve": "all"}, "unknown value of .*reserve"),
        ("scheduling", "static", {"compose": "mixed"}, "unknown option"),
        ("routing", "round-robin", {"_next": 3}, "unknown option"),
        ("admission", "queue-limit", {"max_requests": 0}, "max_requests"),
        ("admission", "queue-limit", {"max_requests": "x"}, "whole number"),
        ("routing", "no_such_module:Class", {}, "cannot import 'no_such_module'"),
        ("routing", "/nowhere/own.py:Class", {}, "does not exist"),
        ("routing", "os:path", {}, "must be a subclass of sim.protocols.RoutingPolicy"),
        ("routing", "policies.routing.round_robin:RoundRobbin", {}, "did you mean 'RoundRobin'"),
        ("routing", ":Class", {}, "not of the form"),
        ("routing", "own:", {}, "not of the form"),
    ],
)
def test_mistakes_are_named(kind: str, name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_policy(kind, name, options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unrelated", "must be a subclass"),
        ("Plain", "must be a subclass of sim.protocols.RoutingPolicy"),
        ("Lost", "unknown class"),
    ],
)
def test_mistakes_in_an_own_file(own_file: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_policy("routing", f"{own_file}:{name}", {})


def test_own_file_that_does_not_parse(own_file: Path) -> None:
    own_file.write_text("def broken(:\n")
    with pytest.raises(UserError, match="cannot import"):
        make_policy("routing", f"{own_file}:Last", {})
