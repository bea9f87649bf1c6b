"""What a user can name (`simulate --list`): read from the catalogues, the registry and the
docstrings, so that the list cannot differ from what works."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sim.cost import hardware, models, profile
from sim.engine.config import EngineConfig
from sim.errors import normalise, unknown
from sim.fields import options_of
from sim.format import rate
from sim.registry import POLICIES, policy_class
from sim.scenario import PolicyChoice, Scenario, TraceSource

WIDTH = 100


def listing(kind: str) -> str:
    """The names of one kind, or of all kinds when `kind` is empty. Raises UserError."""
    by_norm = {normalise(known): known for known in KINDS}
    if not kind:
        chosen = list(KINDS)
    elif normalise(kind) in by_norm:
        chosen = [by_norm[normalise(kind)]]
    else:
        raise unknown("kind of name", kind, KINDS)
    return "\n\n".join("\n".join((KINDS[name][0], *KINDS[name][1]())) for name in chosen)


def _models() -> Iterator[str]:
    for name, shape in models.catalogue().items():
        parts = [f"{rate(shape.num_params / 1e9)} B parameters", f"context {shape.context:,}"]
        if shape.moe is not None:
            parts.append(f"{shape.moe.experts} experts, {shape.moe.topk} at a time")
        if shape.quantization is not None:
            parts.append(shape.quantization)
        yield from _entry(name, ", ".join(parts), models.aliases(shape))


def _gpus() -> Iterator[str]:
    for name, card in hardware.catalogue().items():
        parts = [
            f"{card.memory_gib:.0f} GiB",
            f"{card.bf16:g} TFLOP/s",
            f"{card.bandwidth:,.0f} GB/s",
        ]
        found = profile.for_gpu(card)
        parts.append("timed" if found.derived_for is None else f"derived from {found.gpu}")
        yield from _entry(name, ", ".join(parts), hardware.aliases(card)[1:])


def _profiles() -> Iterator[str]:
    for name, card in hardware.catalogue().items():
        found = profile.for_gpu(card)
        if found.derived_for is not None:
            text = f"derived: efficiencies of {found.gpu} on its own datasheet"
        else:
            number = sum(entry.points for entry in found.entries)
            text = f"{number:,} timings, {found.provenance}"
        yield from _entry(name, text)


def _policies(kind: str) -> Callable[[], Iterator[str]]:
    def lines() -> Iterator[str]:
        for name in POLICIES[kind]:
            cls = policy_class(kind, name)
            yield from _entry(name, _first_sentence(cls.__doc__))
            yield from _options(_FIELD[kind], cls)

    return lines


_FIELD = {"scheduling": "policy", **{k: k for k in ("eviction", "admission", "routing")}}


def _options(path: str, cls: type) -> Iterator[str]:
    docs = _docs(cls)
    for f in dataclasses.fields(cls):
        if f.init:
            text = f"option {path}.{f.name}={_shown(f.default)}. {docs.get(f.name, '')}"
            yield from _wrapped(text.strip())


def _fields() -> Iterator[str]:
    yield from _section(Scenario, "")


def _section(cls: type[Any], path: str) -> Iterator[str]:
    docs, defaults = _docs(cls), _defaults(cls)
    for name, kind in options_of(cls).items():
        if (cls, name) == (EngineConfig, "policy"):  # the scenario's `policy` says it
            continue
        inner = {"trace": TraceSource, "engine": EngineConfig}.get(path + name, kind)
        if dataclasses.is_dataclass(inner) and inner is not PolicyChoice:
            assert isinstance(inner, type)
            yield from _section(inner, f"{path}{name}.")
            continue
        default = defaults[name]
        if isinstance(default, PolicyChoice):
            default = default.name
        head = (
            f"{path}{name}" if default is dataclasses.MISSING else f"{path}{name}={_shown(default)}"
        )
        yield from _entry(head, docs.get(name, ""))


def _defaults(cls: type[Any]) -> Mapping[str, Any]:
    """Engine fields as a user who gives none finds them, for the default model and GPU."""
    if cls is EngineConfig:
        base = Scenario()
        card = hardware.gpu(base.gpu)
        context = models.model(base.model).context
        config = EngineConfig.for_gpu(card.name, card.memory_bytes, context)
        return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return {f.name: f.default for f in dataclasses.fields(cls)}


def _docs(cls: type) -> dict[str, str]:
    """Field -> the first sentence of the text that follows it in the class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            found[field.target.id] = _first_sentence(text.value)
    return found


def _first_sentence(text: str | None) -> str:
    words = " ".join((text or "").split())
    return re.split(r"(?<=[.])\s(?=[A-Z`])", words)[0]


def _entry(name: str, text: str, aliases: tuple[str, ...] = ()) -> Iterator[str]:
    head = f"  {name:<28}  "
    if len(head) > 32 and text:
        yield head.rstrip()
        head = " " * 32
    lines = list(_wrap(text)) or [""]
    yield (head + lines[0]).rstrip()
    yield from (" " * 32 + line for line in lines[1:])
    if aliases:
        yield from _wrapped("also " + ", ".join(aliases))


def _wrapped(text: str) -> Iterator[str]:
    return (" " * 32 + line for line in _wrap(text))


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 32, break_long_words=False, break_on_hyphens=False)


def _shown(value: object) -> str:
    """As one would write it after `--set path=`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


KINDS: Mapping[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "models": ("models: --model NAME, or a Hugging Face config.json", _models),
    "gpus": (
        "gpus: --gpu NAME; peaks are dense 16-bit; of a derived one no kernels were timed",
        _gpus,
    ),
    "policies": (
        "policies: --policy NAME, or file.py:Class (scheduling)",
        _policies("scheduling"),
    ),
    "eviction": ("eviction: --set eviction=NAME, or file.py:Class", _policies("eviction")),
    "admission": ("admission: --set admission=NAME, or file.py:Class", _policies("admission")),
    "routing": ("routing: --routing NAME, or file.py:Class", _policies("routing")),
    "fields": (
        "fields: --set PATH=VALUE, or in a scenario.yaml; with their defaults (those of engine are "
        "vLLM's\nfor the default model and GPU)",
        _fields,
    ),
    "profiles": (
        "profiles: --profile NAME, or a file that calibrate made; each is for its GPU only",
        _profiles,
    ),
}
"""Kind -> its heading, and a function that gives its lines."""
