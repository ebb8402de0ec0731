"""Rules about the ranks of a job: which are far from the others, behind, or silent.

A rank alone cannot check them. A live session does as records arrive (``tap.serve(rules=…)``),
and ``run.alerts`` when it reads a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tensortap.alerts.rules import Rule
from tensortap.arguments import check_count, check_positive, checked

FAR = 8.0  # deviations from which a rank counts as an outlier
_NEVER = 1 << 62


class RankLimits(NamedTuple):
    """Limits beyond which a rank is far from the others, behind, or silent."""

    deviations: float = FAR  # from the median of the ranks, in units of their typical distance
    factor: float = 2.0  # by which it is larger or smaller than the median
    patience: int = 5  # recorded steps in a row
    behind: int = 10  # recorded steps
    seconds: float = 60.0  # without a record, while most ranks have come further


def _of_ranks(name: str, **limits: float) -> Rule:
    """Return a rule that sees no records; `limits` are fields of `RankLimits`."""

    def rule(record: Any, state: Any) -> None:
        return None

    rule.__name__ = name
    rule.__dict__.update(kinds=frozenset(), of_ranks=limits)
    return rule


@checked
def outlier(deviations: float = FAR, factor: float = 2.0, patience: int = 5) -> Rule:
    """Report a rank whose tensor or metric is far from those of the ranks that it should be like.

    It is `deviations` from their median and `factor` times as large or as small, or not finite
    while most ranks are, in `patience` recorded steps in a row.
    """
    check_positive("deviations", deviations)
    check_positive("factor", factor)
    check_count("patience", patience)
    return _of_ranks("outlier", deviations=deviations, factor=factor, patience=patience)


@checked
def straggler(behind: int = 10) -> Rule:
    """Report a rank that is `behind` or more recorded steps behind most ranks."""
    check_count("behind", behind)
    return _of_ranks("straggler", behind=behind)


@checked
def silent(seconds: float = 60.0) -> Rule:
    """Report a rank without a record for `seconds`, while most ranks have come further."""
    check_positive("seconds", seconds)
    return _of_ranks("silent", seconds=seconds)


RANK_RULES: tuple[Rule, ...] = (outlier(), straggler(), silent())


def is_of_ranks(rule: Any) -> bool:
    """Return whether a rule compares ranks."""
    return hasattr(rule, "of_ranks")


def rank_limits(rules: Iterable[Rule] | None) -> RankLimits:
    """Return the limits of rules about ranks; those that are not given find nothing.

    >>> rank_limits([outlier(), silent(seconds=10)]).seconds
    10
    """
    if rules is None:
        return RankLimits()
    limits = RankLimits(patience=_NEVER, behind=_NEVER, seconds=float("inf"))
    for rule in rules:
        if not is_of_ranks(rule):
            raise ValueError(
                "rules must compare ranks: alerts.outlier(), alerts.straggler(), alerts.silent(); "
                f"got {getattr(rule, '__name__', rule)!r:.80}"
            )
        limits = limits._replace(**getattr(rule, "of_ranks"))  # noqa: B009  a Rule is a function
    return limits
