"""Rules in a TOML file: tolerances per name and kind.

    [[rule]]
    names = "blocks.*attn"                          # a regular expression
    kinds = ["Activation", "Gradient"]              # default: all
    rtol = 1e-3

    [[rule]]
    names = "dropout"
    ignore = true

The first rule that matches a record applies.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.files import open_regular, plain
from tensortap.core.patterns import compile_pattern
from tensortap.rooms.compare.tensors import check_tolerance
from tensortap.runs.reader import parse_kind

_LARGEST = 1 << 16  # bytes of a file of rules: keys of a million parts take tomllib minutes


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tolerance of records of matching name and kind: a [[rule]] of a file."""

    names: str = ""
    kinds: str | list[str] = []
    atol: float | None = None
    rtol: float | None = None
    ignore: bool = False

    def fits(self, name: str, kind: str) -> bool:
        """Return whether the rule applies to records of this name and kind."""
        kinds = [self.kinds] if isinstance(self.kinds, str) else self.kinds
        is_kind = not kinds or kind in [parse_kind(each).value for each in kinds]
        return is_kind and compile_pattern(self.names, "names").search(name) is not None


class RuleSet:
    """All rules; the first that matches applies."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = list(rules)
        self._known: dict[tuple[str, str], Rule] = {}

    def find(self, name: str, kind: str) -> Rule:
        """Return the rule for records of this name and kind; one that changes nothing if none fits.

        Records of a name and kind come in millions, rules in dozens.
        """
        key = name, kind
        if key not in self._known:
            self._known[key] = next((r for r in self.rules if r.fits(name, kind)), Rule())
        return self._known[key]


def load_rules(rules: RuleSet | str | Path | None) -> RuleSet:
    """Return rules; those of a file are read, and errors name the rule."""
    if rules is None or isinstance(rules, RuleSet):
        return rules or RuleSet()
    try:
        with open_regular(rules) as stream:
            data = stream.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise TensortapError(f"{rules} has more than {_LARGEST >> 10} KiB of rules")
        return parse_rules(data.decode(), str(rules))
    except FileNotFoundError:
        raise NotFound(f"no such file: {rules}") from None
    except OSError as error:
        raise TensortapError(f"{rules} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TensortapError(f"{rules} is not a text in UTF-8") from None


def parse_rules(text: str, where: str = "rules") -> RuleSet:
    """Parse the rules in a text."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise TensortapError(f"{where}: {plain(str(error), 200)}") from None
    tables = content.get("rule", [])
    if set(content) - {"rule"} or not isinstance(tables, list):
        raise TensortapError(f"{where}: a file of rules may contain only [[rule]] tables")
    rules = []
    for number, table in enumerate(tables, 1):
        try:
            rules.append(_rule(table))
        except (TensortapError, ValueError, OverflowError) as error:
            raise TensortapError(f"{where}, rule {number}: {plain(str(error))}") from None
    return RuleSet(rules)


def _rule(content: object) -> Rule:
    try:
        rule = msgspec.convert(content, Rule)  # errors name the option
    except msgspec.ValidationError as error:
        options = ", ".join(Rule.__struct_fields__)
        raise TensortapError(f"{error}; options are {options}") from None
    check_tolerance(rule.atol, rule.rtol)
    rule.fits("", "")  # checks the pattern and the kinds
    return rule
