"""What a comparison found, as JSON; docs/compare.md is what programs may rely on.

Numbers that JSON has not are text: ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tensortap.compare.report import Difference, Key, Missing, Report
from tensortap.compare.result import Comparison

FORMAT = 1


def report_as_json(report: Report) -> dict[str, Any]:
    """Two runs."""
    return {
        "format": FORMAT,
        "of": "runs",
        "agree": bool(report),
        "a": report.a,
        "b": report.b,
        "compared": report.compared,
        "equal": report.equal,
        "by_statistics": report.by_statistics,
        "ignored": report.ignored,
        "allow_missing": report.allow_missing,
        "provenance": {name: pair_of(pair) for name, pair in report.provenance.items()},
        "first": None if report.first is None else _difference(report.first),
        "culprit": report.culprit,
        "differences": [_difference(each) for each in report.differences],
        "missing": [_missing(each) for each in report.missing],
    }


def comparison_as_json(found: Comparison, a: str, b: str) -> dict[str, Any]:
    """Two files."""
    head = {"format": FORMAT, "of": "files", "agree": bool(found), "a": a, "b": b}
    return {**head, "comparison": figures_of(found)}


def figures_of(found: Comparison) -> dict[str, Any]:
    """All figures of a comparison, under the names that they have in Python.

    >>> figures_of(Comparison(False, count=2, mismatches=1, max_rel=float("inf")))["max_rel"]
    'Infinity'
    """
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    fields["share"] = found.share
    fields["line"] = found.line
    fields["parts"] = [figures_of(part) for part in found.parts]
    return {name: as_json(value) for name, value in fields.items()}


def pair_of(pair: Any) -> dict[str, Any]:
    """What differs around two runs, by side."""
    return {"a": as_json(pair[0]), "b": as_json(pair[1])}


def as_json(value: Any) -> Any:
    """A value as JSON has it; what it has no word for becomes text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    return str(value)


def key_of(key: Key) -> dict[str, Any]:
    """Which record."""
    return dataclasses.asdict(key)


def _difference(each: Difference) -> dict[str, Any]:
    return {
        **key_of(each.key),
        "by": each.by,
        "explanations": list(each.explanations),
        "expected": each.expected,
        "rule": each.rule,
        "comparison": figures_of(each.comparison),
    }


def _missing(each: Missing) -> dict[str, Any]:
    return {**key_of(each.key), "only_in": each.side, "dropped": each.dropped}
