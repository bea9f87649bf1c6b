"""The words in which a workload is described, on the command line and in scenario files.

    poisson:rate=8,n=10000,prompt=lognormal(1020,2735),output=lognormal(129,424),system=4x512

is `ARRIVALS:KEY=VALUE,...`; a value is a number, a word, or a call with arguments in parentheses,
which may be named. File names with other characters than letters, digits and `_ - . /` go in
quotes. A mapping with the same keys (and `arrivals`) says the same; in it a call may also be
written as a mapping, `{lognormal: {median: 1020, p90: 2735}}`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.errors import UserError, unknown

from . import lengths, values
from .arrivals import PROCESSES, ArrivalProcess

_TOKEN = re.compile(r"""\s*(?:('[^']*'|"[^"]*")|([A-Za-z0-9_.+\-/]+)|([(),=:]))""")


@dataclass
class Call:
    """`name(args, key=value)`; a bare word or number is a call without arguments."""

    name: str
    args: list[Call] = field(default_factory=list)
    named: dict[str, Call] = field(default_factory=dict)
    quoted: bool = False


def parse_workload(text: str) -> dict[str, object]:
    """The mapping form of a workload's text; raises UserError."""
    shown = values.shown(text, 100)
    head, colon, rest = text.partition(":")
    if not colon:
        raise UserError(f"workload {shown}: must begin with its arrivals, such as poisson:rate=8")
    plain, named = _Parser(rest).arguments(end=None)
    if plain:
        raise UserError(f"workload {shown}: {plain[0].name!r} must be KEY=VALUE")
    if "arrivals" in named:
        raise UserError(f"workload {shown}: arrivals come first, as in poisson:rate=8")
    return {"arrivals": head.strip(), **named}


def parse_arrivals(text: str) -> ArrivalProcess:
    """An arrival process from `poisson:rate=8`, `gamma:rate=8,cv=2` or `constant:rate=8`."""
    return arrival_process(parse_workload(text))


def arrival_process(options: Mapping[str, object]) -> ArrivalProcess:
    """The process of a mapping with `arrivals` and just its parameters."""
    name = str(options.get("arrivals"))
    if name not in PROCESSES:
        raise unknown("arrival process", name, PROCESSES)
    wanted = inspect.signature(PROCESSES[name]).parameters
    given = {key: value for key, value in options.items() if key != "arrivals"}
    for key in given:
        if key not in wanted:
            raise unknown(f"option of {name} arrivals", key, wanted)
    for key in wanted:
        if key not in given:
            raise UserError(f"{name} arrivals need {key}=NUMBER, as in {_example(name)}")
    return PROCESSES[name](**{key: number(value, key) for key, value in given.items()})


def _example(process: str) -> str:
    return "gamma:rate=8,cv=2" if process == "gamma" else f"{process}:rate=8"


def call(value: object, what: str) -> Call:
    """A value of either form as a Call; raises UserError."""
    if isinstance(value, Call):
        return value
    if isinstance(value, bool) or value is None:
        raise UserError(f"{what}: {value} is not a value that can be used here")
    if isinstance(value, int | float):
        return Call(repr(value))
    if isinstance(value, str):
        return _Parser(value).only(what)
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, inner),) = value.items()
        if isinstance(inner, Mapping):
            named = {str(key): call(item, f"{what}.{key}") for key, item in inner.items()}
            return Call(str(name), [], named)
        if isinstance(inner, Sequence) and not isinstance(inner, str):
            return Call(str(name), [call(item, what) for item in inner])
        return Call(str(name), [call(inner, what)])
    raise UserError(f"{what}: {values.shown(value)} is not a number, a word or NAME(ARGUMENTS)")


def number(value: object, what: str) -> float:
    """A plain number; raises UserError."""
    item = call(value, what)
    try:
        result = float(values.number(item.name, what))
    except values.BadRow as bad:
        raise UserError(bad.reason) from None
    if item.args or item.named or item.quoted:
        raise UserError(f"{what} is {item.name}(...), not a number")
    return result


def count(value: object, what: str) -> int:
    """A whole number, as in 10000 or 1e4; raises UserError."""
    result = number(value, what)
    if abs(result) > 2**53:
        raise UserError(f"{what} is {result:g}, too large")
    if result != int(result):
        raise UserError(f"{what} is {result:g}, not a whole number")
    return int(result)


def word(value: object, what: str) -> str:
    """A word or file name; raises UserError."""
    item = call(value, what)
    if item.args or item.named:
        raise UserError(f"{what} is {item.name}(...), not a name")
    return item.name


def length(value: object, what: str, observed: Callable[[str, Call], Any]) -> lengths.Lengths:
    """A distribution of lengths: 512, fixed(512), uniform(16,2048), lognormal(1020,2735,max=8192),
    empirical(FILE). `observed(file, call)` gives the lengths of a trace. Raises UserError."""
    item = call(value, what)
    if item.name[:1].isdigit() and not item.quoted:
        return _built(lengths.Fixed, {"tokens": count(item, what)}, what)
    known: dict[str, Callable[..., lengths.Lengths]] = {
        "fixed": lengths.Fixed,
        "uniform": lengths.Uniform,
        "lognormal": lengths.Lognormal,
    }
    if item.name == "empirical":
        return lengths.Empirical(observed(file_of(item, what), item))
    if item.name not in known:
        raise unknown(f"length distribution for {what}", item.name, [*known, "empirical"])
    options = inspect.signature(known[item.name]).parameters
    given = bind(item, list(options), what)
    for key, option in options.items():
        if option.default is option.empty and key not in given:
            raise UserError(f"{what}: {item.name} needs {key}")
    converted = {
        key: (number if options[key].annotation == "float" else count)(part, f"{what}: {key}")
        for key, part in given.items()
    }
    return _built(known[item.name], converted, what)


def _built(
    kind: Callable[..., lengths.Lengths], options: Mapping[str, float], what: str
) -> lengths.Lengths:
    try:
        return kind(**options)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def bind(item: Call, names: Sequence[str], what: str) -> dict[str, Call]:
    """The arguments of a call by name, given in the order of `names` or named."""
    if len(item.args) > len(names):
        raise UserError(f"{what}: {item.name} takes {', '.join(names)}, no more")
    bound = dict(zip(names, item.args, strict=False))
    for key, value in item.named.items():
        if key not in names:
            raise unknown(f"argument of {item.name} for {what}", key, names)
        if key in bound:
            raise UserError(f"{what}: {item.name} has {key} twice")
        bound[key] = value
    return bound


def file_of(item: Call, what: str) -> str:
    """The file of `empirical(FILE[,columns='prompt=a,output=b'])`."""
    given = bind(item, ("file", "columns"), what)
    if "file" not in given:
        raise UserError(f"{what}: {item.name} needs a trace file, as in {item.name}(trace.csv)")
    return word(given["file"], what)


class _Parser:
    """Recursive descent over `key=value,...` and `name(args)`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, bool]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise UserError(
                    f"{values.shown(text[at:].strip()[:20])} is not understood in "
                    f"{values.shown(text, 100)}"
                )
            quoted = match[1] is not None
            self.tokens.append((match[1][1:-1] if quoted else match[2] or match[3], quoted))
            at = match.end()
        self.at = 0
        self.depth = 0

    def _error(self, expected: str) -> UserError:
        found = repr(self.tokens[self.at][0]) if self.at < len(self.tokens) else "the end"
        return UserError(f"expected {expected}, found {found}, in {values.shown(self.text, 100)}")

    def _is(self, mark: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at] == (mark, False)

    def only(self, what: str) -> Call:
        """The text as exactly one value."""
        result = self.value()
        if self.at < len(self.tokens):
            raise UserError(f"{what}: {self._error('nothing more')}")
        return result

    def arguments(self, end: str | None) -> tuple[list[Call], dict[str, Call]]:
        """`value, key=value, ...` up to `end` (None: the end of the text)."""
        args: list[Call] = []
        named: dict[str, Call] = {}
        while self.at < len(self.tokens) and not (end and self._is(end)):
            item = self.value()
            if self._is("="):
                self.at += 1
                if item.name in named:
                    raise UserError(f"{item.name} is given twice in {values.shown(self.text, 100)}")
                named[item.name] = self.value()
            else:
                args.append(item)
            if not self._is(","):
                break
            self.at += 1
        if end is None and self.at < len(self.tokens):
            raise self._error("a comma")
        return args, named

    def value(self) -> Call:
        if self.at >= len(self.tokens) or self.tokens[self.at] in [(m, False) for m in "(),=:"]:
            raise self._error("a value")
        name, quoted = self.tokens[self.at]
        self.at += 1
        result = Call(name, quoted=quoted)
        if self._is("("):
            self.at += 1
            self.depth += 1
            if self.depth > 20:
                raise UserError(f"too many parentheses in {values.shown(self.text, 100)}")
            result.args, result.named = self.arguments(")")
            self.depth -= 1
            if not self._is(")"):
                raise self._error("')'")
            self.at += 1
        return result
