"""Typed dataclass fields from untyped values: YAML files, `--set path=value`, keyword arguments.

Errors are the user's and name the path of the field, what was expected and what was given.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sim.errors import UserError, unknown

T = TypeVar("T")


def options_of(cls: type) -> Mapping[str, Any]:
    """Name -> declared type of the fields a user may set: the dataclass fields of `__init__`."""
    return _options_of(cls)


@cache
def _options_of(cls: type) -> Mapping[str, Any]:
    if not dataclasses.is_dataclass(cls):
        return {}
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        raise UserError(f"{cls.__name__}: the type of a field is unknown ({error})") from None
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def build(cls: type[T], values: Mapping[str, Any], where: str, kind: str = "field") -> T:
    """`cls(**values)` with every value checked and converted; `where` names the place."""
    types_ = options_of(cls)
    for name in values:
        if name not in types_:
            raise unknown(f"{kind} of {where}", str(name), types_)
    given = {name: coerce(value, types_[name], f"{where}.{name}") for name, value in values.items()}
    for f in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if f.init and required and f.name not in given:
            raise UserError(f"{where} needs {where}.{f.name}")
    return cls(**given)


def coerce(value: Any, expected: Any, where: str) -> Any:
    """`value` as the type `expected`, or UserError. Whole floats pass as ints (YAML's `1e6`)."""
    origin = get_origin(expected)
    if expected is Any:
        return value
    if origin in (Union, types.UnionType):
        return _coerce_union(value, get_args(expected), where)
    if origin is Literal:
        choices = get_args(expected)
        if value in choices:
            return value
        raise unknown(f"value of {where}", str(value), [str(c) for c in choices])
    if origin is tuple:
        if isinstance(value, Sequence) and not isinstance(value, str):
            item = get_args(expected)[0]
            return tuple(coerce(v, item, f"{where}[{i}]") for i, v in enumerate(value))
        raise _mismatch(value, "a list", where)
    if expected is dict or origin is dict:
        if isinstance(value, Mapping):
            return {str(k): v for k, v in value.items()}
        raise _mismatch(value, "a mapping", where)
    return _coerce_scalar(value, expected, where)


def _coerce_union(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    real = [c for c in choices if c is not type(None)]
    if type(value) in real:
        return value
    for choice in real[:-1]:
        try:
            return coerce(value, choice, where)
        except UserError:
            continue
    return coerce(value, real[-1], where)


def _coerce_scalar(value: Any, expected: type, where: str) -> Any:
    if expected is bool:
        if isinstance(value, bool):
            return value
        raise _mismatch(value, "true or false", where)
    if expected is int:
        if isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        number = _number(value)
        if number is not None and number.is_integer():
            return int(number)
        raise _mismatch(value, "a whole number", where)
    if expected is float:
        number = _number(value)
        if number is None or number != number:
            raise _mismatch(value, "a number", where)
        return number
    if expected is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        raise _mismatch(value, "a text", where)
    if isinstance(value, expected):
        return value
    raise _mismatch(value, f"a {expected.__name__}", where)


def _number(value: Any) -> float | None:
    """YAML reads `1e6` as a text; people mean a number."""
    if isinstance(value, bool) or not isinstance(value, Real | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _mismatch(value: Any, expected: str, where: str) -> UserError:
    return UserError(f"{where} must be {expected}, got {value!r}")
