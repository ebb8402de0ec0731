"""Rules in a TOML file: how close which records have to be.

    [[rule]]
    names = "blocks.*attn"                          # a regular expression
    kinds = ["Activation", "Gradient"]              # all, if it is not said
    pass = "rel_l2 <= 1e-3 or max_abs <= 1e-6"      # instead of the tolerance

    [[rule]]
    names = "loss"
    rtol = 1e-3

    [[rule]]
    names = "dropout"
    ignore = true

    [[rule]]
    names = "head"
    expected = "the head is initialised differently"

The first rule that a record fits counts. Nothing is evaluated: a condition is comparisons of
figures with numbers, joined by ``and``, ``or`` and parentheses.
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensortap.compare.result import Comparison
from tensortap.errors import NotFound, TensortapError
from tensortap.record import Kind

FIGURES: dict[str, Callable[[Comparison], float | None]] = {
    "max_abs": lambda c: c.max_abs,
    "mean_abs": lambda c: c.mean_abs,
    "max_rel": lambda c: c.max_rel,
    "mean_rel": lambda c: c.mean_rel,
    "rel_l2": lambda c: c.rel_l2,
    "cosine": lambda c: c.cosine,
    "mismatches": lambda c: c.mismatches,
    "share": lambda c: c.share,
    "ulps": lambda c: c.ulps,
}
_SIGNS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}
_TOKEN = re.compile(
    r"\s*(?:(?P<sign><=|>=|<|>)|(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<word>[A-Za-z_][A-Za-z_0-9]*)|(?P<bracket>[()]))"
)


class BadCondition(ValueError):
    """A condition that cannot be understood; `place` is where in it."""

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True, slots=True)
class Condition:
    """``rel_l2 <= 1e-3 or max_abs <= 1e-6``, understood."""

    text: str
    _holds: Callable[[Comparison], bool]

    def holds(self, comparison: Comparison) -> bool:
        """Whether it does; never where a value is not finite on one side only, or shapes differ."""
        if comparison.nonfinite or not comparison.count:
            return False
        return self._holds(comparison)

    def __str__(self) -> str:
        return self.text


def condition(text: str) -> Condition:
    """Understand a condition.

    >>> close = Comparison(False, count=3, max_abs=1e-7)
    >>> condition("rel_l2 <= 1e-3 or max_abs <= 1e-6").holds(close)
    True
    """
    reader = _Reader(text)
    found = reader.either()
    if reader.kind:
        raise BadCondition(f"{reader.token!r} does not fit here", reader.place)
    return Condition(text, found)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.next()

    def next(self) -> None:
        rest = self._text[self._at :]
        self.place = self._at + len(rest) - len(rest.lstrip())
        if not rest.strip():
            self.kind, self.token = "", ""
            return
        found = _TOKEN.match(rest)
        if found is None:
            raise BadCondition(f"{rest.strip()[:10]!r} is nothing that a condition has", self.place)
        self.kind = str(found.lastgroup)
        self.token = found[self.kind]
        self._at += found.end()

    def either(self) -> Callable[[Comparison], bool]:
        parts = [self.both()]
        while self.kind == "word" and self.token == "or":
            self.next()
            parts.append(self.both())
        return parts[0] if len(parts) == 1 else lambda c: any(part(c) for part in parts)

    def both(self) -> Callable[[Comparison], bool]:
        parts = [self.one()]
        while self.kind == "word" and self.token == "and":
            self.next()
            parts.append(self.one())
        return parts[0] if len(parts) == 1 else lambda c: all(part(c) for part in parts)

    def one(self) -> Callable[[Comparison], bool]:
        if self.token == "(":
            self.next()
            found = self.either()
            if self.token != ")":
                raise BadCondition("a parenthesis is not closed", self.place)
            self.next()
            return found
        figure = FIGURES.get(self.token) if self.kind == "word" else None
        if figure is None:
            known = ", ".join(FIGURES)
            raise BadCondition(
                f"{self.token or 'the end'!r} is no figure; there are {known}", self.place
            )
        self.next()
        sign = _SIGNS.get(self.token)
        if sign is None:
            raise BadCondition(
                f"one of {' '.join(_SIGNS)} is wanted, not {self.token!r}", self.place
            )
        self.next()
        if self.kind != "number":
            raise BadCondition(f"a number is wanted, not {self.token!r}", self.place)
        limit = float(self.token)
        self.next()

        def holds(comparison: Comparison) -> bool:
            value = figure(comparison)
            return value is not None and sign(value, limit)

        return holds


@dataclass(frozen=True, slots=True)
class Rule:
    """How records are judged whose names and kinds it fits."""

    names: re.Pattern[str]
    kinds: frozenset[str] = frozenset()
    atol: float | None = None
    rtol: float | None = None
    condition: Condition | None = None
    ignore: bool = False
    expected: str = ""

    def fits(self, name: str, kind: str) -> bool:
        """Whether it is about such records."""
        return (not self.kinds or kind in self.kinds) and self.names.search(name) is not None


class Book:
    """All rules; the first that fits counts."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules = rules
        self._known: dict[tuple[str, str], Rule | None] = {}

    def find(self, name: str, kind: str) -> Rule | None:
        """The rule for records of this name and kind."""
        key = name, kind
        if key not in self._known:
            self._known[key] = next((r for r in self.rules if r.fits(name, kind)), None)
        return self._known[key]


def load_rules(path: str | Path) -> Book:
    """The rules of a file; what is wrong in it is said with line and column."""
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise NotFound(f"no such file: {path}") from None
    return parse_rules(text, str(path))


def parse_rules(text: str, where: str = "rules") -> Book:
    """The rules that a text tells."""
    toml = _toml()
    try:
        content = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise TensortapError(f"{where}: {error}") from None
    unknown = set(content) - {"rule"}
    if unknown:
        raise _wrong(text, where, min(unknown), "a file of rules has [[rule]] only")
    found = content.get("rule", [])
    if not isinstance(found, list):
        raise _wrong(text, where, "rule", "each rule begins with [[rule]]")
    return Book([_rule(each, number, text, where) for number, each in enumerate(found)])


def _rule(said: dict[str, Any], number: int, text: str, where: str) -> Rule:
    known = {"names", "kinds", "atol", "rtol", "pass", "ignore", "expected"}
    for key in said:
        if key not in known:
            options = ", ".join(sorted(known))
            raise _wrong(text, where, key, f"a rule has no {key!r}; there are {options}", number)
    try:
        names = re.compile(said.get("names", ""))
    except (re.error, TypeError) as error:
        raise _wrong(text, where, "names", f"no regular expression: {error}", number) from None
    kinds = said.get("kinds", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    for kind in kinds:
        if kind not in {k.value for k in Kind}:
            options = ", ".join(k.value for k in Kind)
            raise _wrong(text, where, "kinds", f"no kind is called {kind!r}: {options}", number)
    for key in ("atol", "rtol"):
        if key in said and not (isinstance(said[key], (int, float)) and said[key] >= 0):
            raise _wrong(text, where, key, "a tolerance is a number from 0 on", number)
    passes = None
    if "pass" in said:
        try:
            passes = condition(str(said["pass"]))
        except BadCondition as error:
            shift = error.place + 1  # after the quote
            raise _wrong(text, where, "pass", str(error), number, shift) from None
    return Rule(
        names, frozenset(kinds), said.get("atol"), said.get("rtol"), passes,
        bool(said.get("ignore", False)), str(said.get("expected", "")),
    )  # fmt: skip


def _wrong(
    text: str, where: str, key: str, message: str, number: int = 0, shift: int | None = None
) -> TensortapError:
    """An error with line and column: of the key, or of a place in its value."""
    rule = -1
    for line_number, line in enumerate(text.splitlines(), 1):
        rule += line.strip().startswith("[[rule]]")
        found = re.match(rf"\s*(\[*)\s*{re.escape(key)}\b(\s*=\s*)?", line)
        if found and (rule == number or rule < 0 or found[1]):
            column = len(line) - len(line.lstrip()) + 1
            if shift is not None and found[2]:
                column = found.end() + 1 + shift
            return TensortapError(f"{where}, line {line_number}, column {column}: {message}")
    return TensortapError(f"{where}: {message}")


def _toml() -> Any:
    try:
        return importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        return importlib.import_module("tomli")
