"""Rules in a TOML file: tolerances per name and kind.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tensortap.core.errors import NotFound, PatternError, TensortapError
from tensortap.core.patterns import compile_pattern
from tensortap.core.record import Kind
from tensortap.rooms.compare.result import Comparison

Check = Callable[[Comparison], bool]
FIGURES = (
    "max_abs", "mean_abs", "max_rel", "mean_rel", "rel_l2", "cosine", "mismatches", "share", "ulps",
)  # fmt: skip
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
    _holds: Check

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
    reader = _ConditionReader(text)
    found = reader.either()
    if reader.kind:
        reader.fail(f"unexpected {reader.token!r}")
    return Condition(text, found)


class _ConditionReader:
    """A recursive descent parser that is one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.next()

    def fail(self, message: str) -> NoReturn:
        raise BadCondition(message, self.position)

    def next(self) -> None:
        rest = self._text[self._at :]
        self.position = self._at + len(rest) - len(rest.lstrip())
        self.kind = self.token = ""
        found = _TOKEN.match(rest)
        if found is not None:
            self.kind = str(found.lastgroup)
            self.token = found[self.kind]
            self._at += found.end()
        elif rest.strip():
            self.fail(f"{rest.strip()[:10]!r} is not part of a condition")

    def either(self) -> Check:
        return self._joined("or", self.both, any)

    def both(self) -> Check:
        return self._joined("and", self.one, all)

    def _joined(
        self, word: str, part: Callable[[], Check], decide: Callable[[Iterable[bool]], bool]
    ) -> Check:
        parts = [part()]
        while self.token == word:
            self.next()
            parts.append(part())
        return lambda comparison: decide(each(comparison) for each in parts)

    def one(self) -> Check:
        if self.token == "(":
            self.next()
            found = self.either()
            if self.token != ")":
                self.fail("missing closing parenthesis")
            self.next()
            return found
        figure = self.token
        if figure not in FIGURES:
            known = ", ".join(FIGURES)
            self.fail(f"{figure or 'the end'!r} is not a figure; figures are {known}")
        self.next()
        sign = _SIGNS.get(self.token)
        if sign is None:
            self.fail(f"one of {' '.join(_SIGNS)} expected, got {self.token!r}")
        self.next()
        if self.kind != "number":
            self.fail(f"a number expected, got {self.token!r}")
        limit = float(self.token)
        self.next()

        def holds(comparison: Comparison) -> bool:
            value = getattr(comparison, figure)
            return value is not None and bool(sign(value, limit))

        return holds


@dataclass(frozen=True, slots=True)
class Rule:
    """The condition that records of matching name and kind must meet."""

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
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
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
        names = compile_pattern(said.get("names", ""))
    except PatternError as error:
        raise _wrong(text, where, "names", str(error), number) from None
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
