"""Rules in a TOML file: tolerances per name and kind.

    [[rule]]
    names = "blocks.*attn"                          # a regular expression
    kinds = ["Activation", "Gradient"]              # default: all
    rtol = 1e-3

    [[rule]]
    names = "dropout"
    ignore = true

    [[rule]]
    names = "head"
    expected = "the head is initialized differently"

The first rule that matches a record applies.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.patterns import compile_pattern
from tensortap.rooms.compare.tensors import check_tolerance
from tensortap.runs.reader import parse_kind

_OPTIONS = ("names", "kinds", "atol", "rtol", "ignore", "expected")


@dataclass(frozen=True, slots=True)
class Rule:
    """The tolerance of records of matching name and kind."""

    names: re.Pattern[str]
    kinds: frozenset[str] = frozenset()
    atol: float | None = None
    rtol: float | None = None
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
    """Read rules from a file; errors name the rule."""
    try:
        return parse_rules(Path(path).read_text(), str(path))
    except FileNotFoundError:
        raise NotFound(f"no such file: {path}") from None


def parse_rules(text: str, where: str = "rules") -> RuleSet:
    """Parse the rules in a text."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TensortapError(f"{where}: {error}") from None
    tables = content.get("rule", [])
    if set(content) - {"rule"} or not isinstance(tables, list):
        raise TensortapError(f"{where}: a file of rules may contain only [[rule]] tables")
    rules = []
    for number, table in enumerate(tables, 1):
        try:
            rules.append(_rule(table))
        except (TensortapError, TypeError, ValueError) as error:
            raise TensortapError(f"{where}, rule {number}: {error}") from None
    return RuleSet(rules)


def _rule(table: dict[str, Any]) -> Rule:
    for key in table:
        if key not in _OPTIONS:
            raise TensortapError(f"unknown option {key!r}; options are {', '.join(_OPTIONS)}")
    kinds = table.get("kinds", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    check_tolerance(table.get("atol"), table.get("rtol"))
    return Rule(
        compile_pattern(table.get("names", ""), "names"),
        frozenset(parse_kind(kind).value for kind in kinds), table.get("atol"), table.get("rtol"),
        bool(table.get("ignore", False)), str(table.get("expected", "")),
    )  # fmt: skip
