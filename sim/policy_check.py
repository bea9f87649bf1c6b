"""Is a user's own policy class one? What can be told before it runs is told then, in one line."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

from sim.errors import UserError
from sim.fields import coerce
from sim.protocols import RoutingPolicy, SchedulingPolicy, overrides


def check_class(cls: type, base: type, options: Mapping[str, Any], where: str) -> None:
    """UserError when `cls` cannot be made, or when a method of `base` that it replaces cannot be
    called as `base` says. `where` names the policy."""
    if inspect.isabstract(cls):
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        raise UserError(f"{where} is abstract: it must define {', '.join(missing)}")
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise UserError(
            f"{where} cannot be made without arguments ({error}); make it a dataclass, whose "
            "fields with defaults are its options"
        ) from None
    for name, method in inspect.getmembers(base, inspect.isfunction):
        own = inspect.getattr_static(cls, name)
        if name.startswith("_") or own is method:
            continue
        asked = list(inspect.signature(method).parameters)[1:]
        if not callable(getattr(cls, name)):
            raise UserError(f"{where}: {name} must be a method, not {own!r}")
        given = asked if isinstance(own, staticmethod | classmethod) else ["self", *asked]
        try:
            inspect.signature(getattr(cls, name)).bind(*given)
        except TypeError as error:
            raise UserError(
                f"{where}: {name}() is called as {name}({', '.join(asked)}): {error}"
            ) from None


def check_object(policy: Any, where: str) -> None:
    """UserError when what the policy declares is not in the words that are understood, or when
    the method that it relies on is missing."""
    if isinstance(policy, RoutingPolicy) and not overrides(policy, "choose"):
        raise UserError(f"{where} must define choose(request, view)")
    if not isinstance(policy, SchedulingPolicy):
        return
    for name, expected in get_type_hints(SchedulingPolicy).items():
        coerce(getattr(policy, name), expected, f"{name} of {where}")
    if policy.watermark is not None and not 0 <= policy.watermark < 1:
        raise UserError(f"watermark of {where} must be in [0, 1), got {policy.watermark!r}")
    if policy.order != "fcfs" and not overrides(policy, "key"):
        raise UserError(f"{where} declares order={policy.order!r}: it must define key()")
