"""Verdicts: which operation made a value that is not finite, and which alerts that explains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tensortap.alerts.alert import WHY, Alert
from tensortap.core.errors import NotFound

NO_VERDICT = (
    "there is no verdict. Wrap the step function: "
    "step = tap.blackbox(train_step, model, optimizer), or run a bad step inside of: "
    "with tap.ops(model)"
)


_NOT_FINITE = ("nan", "inf")  # rules whose alerts a verdict explains


def verdict_of(
    alerts: Iterable[Alert],
    step: int | None = None,
    rank: int | None = None,
    of: tuple[str, str] | None = None,
) -> Alert | None:
    """Return the newest verdict, or that of a step or rank; one with an explanation comes first.

    `of` is the kind and the name of a verdict.
    """
    all_ = [each for each in alerts if each.rule == WHY]
    found = [
        each
        for each in all_
        if step in (None, each.step)
        and rank in (None, each.rank)
        and of in (None, (each.kind.value, each.name))
    ]
    if all_ and not found:
        known = ", ".join(map(str, sorted({each.step for each in all_})[:8]))
        raise NotFound(f"no verdict of this step and rank; verdicts are of steps {known}")
    return max(found, key=lambda e: (e.step, e.explanation is not None), default=None)


def verdicts_of(alerts: Iterable[Alert]) -> Callable[[Alert], Alert | None]:
    """Return a function that finds the verdict that explains an alert; None if there is none.

    It is of the same step and rank; of several, one of the module where the alert began. What
    began on another rank is explained there.
    """
    known: dict[int, list[Alert]] = {}
    for each in alerts:
        if each.rule == WHY:
            known.setdefault(each.step, []).append(each)

    def find(alert: Alert) -> Alert | None:
        if alert.rule == WHY:
            return alert
        of_step = known.get(alert.step, []) if alert.rule in _NOT_FINITE else []
        began = alert.origin or alert.module
        own = [each for each in of_step if each.rank == alert.rank]
        best = max(own, key=lambda e: (e.module == began, e.explanation is not None), default=None)
        if best is None or best.explanation is not None:
            return best
        same = (e for e in of_step if e.message == best.message and e.explanation is not None)
        return next(same, best)

    return find


def explain_rows(alerts: list[Alert], rows: Iterable[tuple[Alert, dict[str, Any]]]) -> None:
    """Add to the rows of the page the address of the verdict: its step, rank, kind and name."""
    find = verdicts_of(alerts)
    for alert, row in rows:
        if (verdict := find(alert)) is not None:
            kind, name = verdict.kind.value, verdict.name
            row["why"] = f"{verdict.step} {verdict.rank} {kind} {name}"
