"""Names of policies: one literal table, and a user's own `module:Class` or `file.py:Class`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from sim.errors import UserError, normalise, unknown
from sim.fields import build
from sim.policy_check import check_class, check_object
from sim.protocols import AdmissionPolicy, EvictionPolicy, RoutingPolicy, SchedulingPolicy

POLICIES: dict[str, dict[str, str]] = {
    "scheduling": {
        "static": "policies.scheduling.static:Static",
        "continuous": "policies.scheduling.continuous:Continuous",
        "chunked": "policies.scheduling.chunked:Chunked",
        "priority": "policies.scheduling.priority:Priority",
    },
    "eviction": {
        "lru": "policies.eviction.lru:LRU",
    },
    "admission": {
        "always": "policies.admission.always:Always",
        "queue-limit": "policies.admission.queue_limit:QueueLimit",
    },
    "routing": {
        "round-robin": "policies.routing.round_robin:RoundRobin",
        "least-requests": "policies.routing.least_requests:LeastRequests",
    },
}
"""kind -> name -> `module:Class`. To add a policy, add its class and its line here."""

_BASES: dict[str, type] = {
    "scheduling": SchedulingPolicy,
    "eviction": EvictionPolicy,
    "admission": AdmissionPolicy,
    "routing": RoutingPolicy,
}


def policy_class(kind: str, name: str) -> type[Any]:
    """The class that `name` stands for. `kind` is a key of `POLICIES`."""
    table = POLICIES[kind]
    if ":" in name:
        cls = _load(name)
    else:
        by_norm = {normalise(known): target for known, target in table.items()}
        target = by_norm.get(normalise(name))
        if target is None:
            raise unknown(f"{kind} policy", name, table)
        cls = _load(target)
    base = _BASES[kind]
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise UserError(
            f"{kind} policy {name!r} must be a subclass of sim.protocols.{base.__name__}"
        )
    return cls


def make_policy(kind: str, name: str, options: Mapping[str, Any]) -> Any:
    """A new policy object with its options, which are the dataclass fields of its class."""
    cls, where = policy_class(kind, name), f"{kind} policy {name!r}"
    own = ":" in name  # the shipped ones are checked by their tests
    if own:
        check_class(cls, _BASES[kind], options, where)
    policy = build(cls, options, where, kind="option")
    if own:
        check_object(policy, where)
    return policy


def _load(target: str) -> Any:
    """The object named by `module:attribute` or `path/to/file.py:attribute`."""
    place, _, attribute = target.rpartition(":")
    if not place or not attribute:
        raise UserError(f"{target!r} is not of the form module:Class or path/to/file.py:Class")
    try:
        module = _load_file(place) if place.endswith(".py") else _import(place)
    except (ImportError, SyntaxError, OSError) as error:
        raise UserError(f"cannot import {place!r} for {target!r}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = [n for n, v in vars(module).items() if isinstance(v, type)]
        raise unknown(f"class in {place}", attribute, names) from None


def _import(module: str) -> ModuleType:
    """Import by name; a user's module may lie in the current folder."""
    here = str(Path.cwd())
    if here in sys.path or "" in sys.path:
        return importlib.import_module(module)
    sys.path.append(here)
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(here)


def _load_file(path: str) -> ModuleType:
    """Run the file, anew each time: in a notebook it may have been edited since."""
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"policy file {path!r} does not exist")
    name = f"_policy_file_{normalise(str(file))}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"policy file {path!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while the file runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
