"""The result of a comparison as JSON; docs/compare.md is the specification.

Numbers that JSON lacks are text: ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tensortap.compare.report import CompareReport, Difference, Key, Missing
from tensortap.compare.result import Comparison

FORMAT = 1


def report_as_json(report: CompareReport) -> dict[str, Any]:
    """Return the report on two runs as JSON."""
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
    """Return the comparison of two files as JSON."""
    head = {"format": FORMAT, "of": "files", "agree": bool(found), "a": a, "b": b}
    return {**head, "comparison": figures_of(found)}


def figures_of(found: Comparison) -> dict[str, Any]:
    """Return all figures of a comparison under their Python names.

    >>> figures_of(Comparison(False, count=2, mismatches=1, max_rel=float("inf")))["max_rel"]
    'Infinity'
    """
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    fields["share"] = found.share
    fields["line"] = found.line
    fields["parts"] = [figures_of(part) for part in found.parts]
    return {name: as_json(value) for name, value in fields.items()}


def pair_of(pair: Any) -> dict[str, Any]:
    """Return a pair of environments by run."""
    return {"a": as_json(pair[0]), "b": as_json(pair[1])}


def as_json(value: Any) -> Any:
    """Return a value as JSON; what JSON lacks becomes text."""
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
    """Return the key of a record as JSON."""
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
