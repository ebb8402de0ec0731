"""ComparisonOptions in a TOML file: tolerances per name and kind.

    [[rule]]
    names = "blocks.*attn"                          # a regular expression
    kinds = ["Activation", "Gradient"]              # default: all
    pass = "rel_l2 <= 1e-3 or max_abs <= 1e-6"      # instead of the tolerance

    [[rule]]
    names = "loss"
    rtol = 1e-3

    [[rule]]
    names = "dropout"
    ignore = true

    [[rule]]
    names = "head"
    expected = "the head is initialized differently"

The first rule that matches a record applies. Nothing is evaluated as code: a condition compares
figures with numbers, joined by ``and``, ``or`` and parentheses.
"""

from __future__ import annotations

import operator
import re
import tomllib
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
    """A condition that cannot be parsed; `position` is where."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition such as ``rel_l2 <= 1e-3 or max_abs <= 1e-6``."""

    text: str
    _holds: Callable[[Comparison], bool]

    def holds(self, comparison: Comparison) -> bool:
        """Return whether it holds; never for shapes or non-finite values that differ."""
        if comparison.nonfinite or not comparison.count:
            return False
        return self._holds(comparison)

    def __str__(self) -> str:
        return self.text


def condition(text: str) -> Condition:
    """Parse a condition.

    >>> close = Comparison(False, count=3, max_abs=1e-7)
    >>> condition("rel_l2 <= 1e-3 or max_abs <= 1e-6").holds(close)
    True
    """
    reader = _Reader(text)
    found = reader.either()
    if reader.kind:
        raise BadCondition(f"unexpected {reader.token!r}", reader.position)
    return Condition(text, found)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.next()

    def next(self) -> None:
        rest = self._text[self._at :]
        self.position = self._at + len(rest) - len(rest.lstrip())
        if not rest.strip():
            self.kind, self.token = "", ""
            return
        found = _TOKEN.match(rest)
        if found is None:
            raise BadCondition(f"{rest.strip()[:10]!r} is not part of a condition", self.position)
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
                raise BadCondition("missing closing parenthesis", self.position)
            self.next()
            return found
        figure = FIGURES.get(self.token) if self.kind == "word" else None
        if figure is None:
            known = ", ".join(FIGURES)
            raise BadCondition(
                f"{self.token or 'the end'!r} is not a figure; figures are {known}", self.position
            )
        self.next()
        sign = _SIGNS.get(self.token)
        if sign is None:
            raise BadCondition(
                f"one of {' '.join(_SIGNS)} expected, got {self.token!r}", self.position
            )
        self.next()
        if self.kind != "number":
            raise BadCondition(f"a number expected, got {self.token!r}", self.position)
        limit = float(self.token)
        self.next()

        def holds(comparison: Comparison) -> bool:
            value = figure(comparison)
            return value is not None and sign(value, limit)

        return holds


@dataclass(frozen=True, slots=True)
class Rule:
    """How to judge records with matching name and kind."""

    names: re.Pattern[str]
    kinds: frozenset[str] = frozenset()
    atol: float | None = None
    rtol: float | None = None
    condition: Condition | None = None
    ignore: bool = False
    expected: str = ""

    def fits(self, name: str, kind: str) -> bool:
        """Return whether the rule applies to records of this name and kind."""
        return (not self.kinds or kind in self.kinds) and self.names.search(name) is not None


class RuleSet:
    """All rules; the first that matches applies."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules = rules
        self._known: dict[tuple[str, str], Rule | None] = {}

    def find(self, name: str, kind: str) -> Rule | None:
        """Return the rule for records of this name and kind."""
        key = name, kind
        if key not in self._known:
            self._known[key] = next((r for r in self.rules if r.fits(name, kind)), None)
        return self._known[key]


def load_rules(path: str | Path) -> RuleSet:
    """Read rules from a file; errors name line and column."""
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise NotFound(f"no such file: {path}") from None
    return parse_rules(text, str(path))


def parse_rules(text: str, where: str = "rules") -> RuleSet:
    """Parse the rules in a text."""
    toml = tomllib
    try:
        content = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise TensortapError(f"{where}: {error}") from None
    unknown = set(content) - {"rule"}
    if unknown:
        raise _wrong(text, where, min(unknown), "a file of rules may contain only [[rule]] tables")
    found = content.get("rule", [])
    if not isinstance(found, list):
        raise _wrong(text, where, "rule", "each rule must begin with [[rule]]")
    return RuleSet([_rule(each, number, text, where) for number, each in enumerate(found)])


def _rule(said: dict[str, Any], number: int, text: str, where: str) -> Rule:
    known = {"names", "kinds", "atol", "rtol", "pass", "ignore", "expected"}
    for key in said:
        if key not in known:
            options = ", ".join(sorted(known))
            raise _wrong(text, where, key, f"unknown option {key!r}; options are {options}", number)
    try:
        names = re.compile(said.get("names", ""))
    except (re.error, TypeError) as error:
        raise _wrong(text, where, "names", f"not a regular expression: {error}", number) from None
    kinds = said.get("kinds", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    for kind in kinds:
        if kind not in {k.value for k in Kind}:
            options = ", ".join(k.value for k in Kind)
            raise _wrong(
                text, where, "kinds", f"unknown kind {kind!r}; kinds are {options}", number
            )
    for key in ("atol", "rtol"):
        if key in said and not (isinstance(said[key], (int, float)) and said[key] >= 0):
            raise _wrong(text, where, key, "a tolerance must be a number of at least 0", number)
    passes = None
    if "pass" in said:
        try:
            passes = condition(str(said["pass"]))
        except BadCondition as error:
            shift = error.position + 1  # after the quote
            raise _wrong(text, where, "pass", str(error), number, shift) from None
    return Rule(
        names, frozenset(kinds), said.get("atol"), said.get("rtol"), passes,
        bool(said.get("ignore", False)), str(said.get("expected", "")),
    )  # fmt: skip


def _wrong(
    text: str, where: str, key: str, message: str, number: int = 0, shift: int | None = None
) -> TensortapError:
    """Return an error with line and column of the key, or of a position in its value."""
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
