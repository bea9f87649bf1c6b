"""A scenario as a plain tree of values: read from YAML, changed by path."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from sim.errors import UserError
from sim.files import read_text

DEFAULT_POLICIES = {
    "policy": "chunked",
    "eviction": "lru",
    "admission": "always",
    "routing": "round-robin",
}
"""The fields that name a policy, and the policy that each names when left out."""


class _Loader(yaml.SafeLoader):
    """YAML in which a mapping that names a key twice is an error, as the standard says."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    message = f"found {key.value!r} twice"
                    raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The plain value of a YAML text. Raises ValueError, with a message of one line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).replace('"<unicode string>", ', "").split())) from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a scenario file; a relative trace path in it is relative to the file."""
    file = Path(path)
    text = read_text(file)
    try:
        tree = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a scenario is a mapping of fields, not a {type(tree).__name__}")
    trace = tree.get("trace")
    if isinstance(trace, str):
        tree["trace"] = str(file.parent / trace)
    elif isinstance(trace, dict) and isinstance(trace.get("path"), str):
        trace["path"] = str(file.parent / trace["path"])
    return tree


def set_text(tree: dict[str, Any], setting: str) -> None:
    """Change one field as `--set` says: `engine.block_size=32`. UserError without a `=`."""
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise UserError(f"--set {setting}: write --set path=value")
    try:
        value = parse_yaml(text)
    except ValueError:
        value = text
    set_path(tree, path.strip(), value)


def set_path(tree: dict[str, Any], path: str, value: Any) -> None:
    """Change one field of a plain tree in place: `policy`, `policy.reserve`, `engine.block_size`.

    A policy set by name forgets the options of the one before it.
    """
    *parents, last = path.split(".")
    here = tree
    for depth, name in enumerate(parents):
        below = here.get(name)
        if isinstance(below, str) and depth == 0 and (name == "trace" or name in DEFAULT_POLICIES):
            below = {"path" if name == "trace" else "name": below}
        elif below is None:
            policy = DEFAULT_POLICIES.get(name) if depth == 0 else None
            below = {} if policy is None else {"name": policy}
        elif not isinstance(below, dict):
            raise UserError(f"cannot set {path!r}: {name!r} has no fields")
        here[name] = here = copy.copy(below)
    if not last or not all(parents):
        raise UserError(f"cannot set {path!r}: not of the form field or section.field")
    here[last] = value
