"""The health of a run: one row per rule, worst first, for a terminal, a report and the page."""

from __future__ import annotations

import collections
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from rich.text import Text

from tensortap import alerts as all_rules
from tensortap.alerts import Alert, default_rules
from tensortap.alerts.alert import HINT, WHY
from tensortap.alerts.rules import ACTIVE_RULES, LIMITS, active_rules
from tensortap.api.run_alerts import alert_finders, rule_alerts, run_alerts
from tensortap.core.files import plain
from tensortap.core.record import Kind
from tensortap.rooms.health.steps import BLIND_RULES
from tensortap.rooms.report.html_file import escape, section
from tensortap.table.table import Table

if TYPE_CHECKING:
    from tensortap.rooms.report.run_report import RunReport, Section

State = Literal["problem", "hint", "blind", "fine", "unknown"]
_STYLES: dict[State, str] = {
    "problem": "red", "hint": "yellow", "blind": "dim", "fine": "green", "unknown": "dim",
}  # fmt: skip
"""The states, worst first, and their colors in a terminal."""
_WORDS: dict[State, str] = {
    "problem": "found a problem", "hint": "gave a hint", "blind": "could not look",
    "fine": "found nothing", "unknown": "not active",
}  # fmt: skip
_OTHERS: tuple[tuple[State, str], ...] = (
    ("blind", "could not look"), ("fine", "fine"), ("unknown", "not active"),
)  # fmt: skip
_TENSORS = frozenset(
    (Kind.ACTIVATION, Kind.GRADIENT, Kind.WEIGHT_GRADIENT, Kind.WEIGHT, Kind.OPTIMISER_STATE)
)
_MOST_LINES = 7  # of findings, in a verdict of ten

REMEDIES = {
    "nan": "See the module it began in; tap.blackbox(step, model, optimizer) names the operation.",
    "inf": "See the module it began in; lower the learning rate, or scale the loss in float16.",
    "exploding": "Clip gradients, lower the learning rate, check the batch.",
    "vanishing": "Look for dead layers behind it, a loss times 0, and underflow in 16 bits.",
    "saturated": "Use bfloat16, or scale the tensor.",
    "constant": "Check its input and its initialization.",
    "loss_spike": "Check the batch of that step; clip gradients or lower the learning rate.",
    "replicas": "Check for missing synchronization and faulty memory; go back to a checkpoint.",
    "outlier": "Check its data and its hardware.",
    "behind": "Check whether its process lives; check its data loading and its hardware.",
    "no_optimizer": "Create the optimizer with all parameters of the model.",
    "learning_rate": "Check the schedule: its warmup, its unit (batches or epochs), its last step.",
    "not_normalized": "Subtract the mean of the training data and divide by its deviation.",
}
"""Remedies by rule. Rules that are missing here name the remedy in their message."""

_NOT_CHOSEN = {
    "replicas": "a rank whose weights or optimizer state differ from those of the others",
    "outlier": "a rank that is far from the others",
    "behind": "a rank that is behind the others, or sends nothing",
    "same_data": "replicas that all get the same data",
    "clip_norm": "gradients that are clipped by a norm which is not that of the whole model",
    "unseen": "what cannot be observed as usual",
    "remark": "limits of what is observed",
    "left_out": "alerts beyond the first 10,000",
}  # rules that nobody passes to `alerts=`


def looks_for(rule: str) -> str:
    """Return the problem that a rule looks for: its function's first sentence, without the verb.

    Parameters become the numbers that they are by default.

    >>> looks_for("dead"), looks_for("outlier"), looks_for("mine")
    ('an output of which at least 95 % is zero, 3 steps in a row', 'a rank that is far ...', '')
    """
    if rule in _NOT_CHOSEN:
        return _NOT_CHOSEN[rule]
    function = getattr(all_rules, rule, None)
    options = {} if function is None else inspect.signature(function).parameters

    def number(found: re.Match[str]) -> str:
        name = found[1]
        default = options[name].default if name in options else name
        if name == "share":
            return f"{100 * default:g} %"
        return f"{default:,g}" if isinstance(default, int | float) else str(default)

    # since Python 3.13, None has a docstring
    text = "" if function is None else re.sub(r"`(\w+)`", number, function.__doc__ or "")
    first = " ".join(text.partition("\n\n")[0].split()).rstrip(".").replace("`", "")
    for verb in ("Report ", "Give a hint about ", "Give a hint if "):
        first = first.removeprefix(verb)
    return first


class RuleHealth(NamedTuple):
    """The findings of one rule in a run: its first alert, and the number of alerts.

    `state` is ``"unknown"`` if the rule was not active, and ``"blind"`` if it had nothing to look
    at; then `message` is the reason.
    """

    rule: str
    state: State
    looks_for: str
    remedy: str
    alerts: int = 0
    name: str = ""
    kind: str = ""
    step: int = 0
    rank: int = 0
    message: str = ""
    also: tuple[str, ...] = ()  # the next places in the same step


def health_of(
    table: Table, reader: object, alerts: list[Alert] | None = None, *, compute: bool = False
) -> list[RuleHealth]:
    """Return one row per rule with its findings, worst first.

    `alerts` are those of the run, if they are known. `compute` applies the rules over statistics
    to a run in which no rule was active.
    """
    active = active_rules(reader)
    alerts = run_alerts(table, reader) if alerts is None else list(alerts)
    if compute and not active:
        alerts += rule_alerts(table, True)
        active = {rule.__name__ for rule in default_rules() if not hasattr(rule, "of_steps")}
    active.update(rule for finder in alert_finders(table) for rule in finder.rules)
    seldom = {rule: why for rule, why in _seldom_shown(table).items() if rule in active}
    blind = seldom | _blind_rules(reader, active)
    return rows_of([*alerts, *table.alerts(HINT)], active, blind)


def _seldom_shown(table: Table) -> dict[str, str]:
    """Return the rules over statistics that saw too few steps to find anything, and how few."""
    table, found = table.index(), {}
    names, places = np.asarray(table.name, np.int64), np.asarray(table.step, np.int64)
    for rule in default_rules():
        kinds = {kind.value for kind in getattr(rule, "kinds", frozenset()) & _TENSORS}
        chosen = np.isin(table.kind, [n for n, kind in enumerate(table.kinds) if kind in kinds])
        steps, looks = places[chosen], rule.__dict__.get("looks", 1)
        if not kinds:
            continue
        if not len(steps):
            found[rule.__name__] = "no tensor of its kinds was seen"
        elif np.ptp(steps) + 1 < rule.__dict__.get("span", 1):
            found[rule.__name__] = f"fewer than {rule.__dict__['span']} steps were seen"
        elif looks > 1:
            tensors = names[chosen] * len(table.kinds) + table.kind[chosen]
            rows = np.bincount(tensors)
            maybe = rows[tensors] < 100 * looks  # of the others, counting the steps takes long
            seen = np.unique(tensors[maybe] * (steps.max() + 1) + steps[maybe])
            counts = np.bincount(seen // (steps.max() + 1))
            if few := int(((counts > 0) & (counts < looks)).sum()):
                share = f"{few:,} of {int((rows > 0).sum()):,} tensors"
                found[rule.__name__] = f"{share} were seen in fewer than {looks} steps"
    return found


def _blind_rules(reader: Any, active: Collection[str]) -> dict[str, str]:
    """Return the rules that no tracker of a run had anything to look at for, and why."""
    found: list[dict[str, str]] = []
    for record in reader.records(BLIND_RULES) if hasattr(reader, "load") else ():
        value = reader.load(record).value
        lines = value.splitlines() if isinstance(value, str) else ()
        found.append(dict(line.split(": ", 1) for line in lines if ": " in line))
    if not found:
        of_steps = (rule.__name__ for rule in default_rules() if hasattr(rule, "of_steps"))
        return dict.fromkeys(
            set(of_steps).intersection(active), "no step of a torch model has ended"
        )
    return {rule: why for rule, why in found[-1].items() if all(rule in each for each in found)}


def untracked_ranks(reader: Any) -> str:
    """Return in words on which ranks of a job no model was tracked; empty if there are none."""
    found = {record.rank: record.world_size for record in reader.records(ACTIVE_RULES)}
    named = ", ".join(str(n) for n in range(max(found.values(), default=0)) if n not in found)
    return f"no model was tracked on rank {named}: nothing is known there" if named else ""


def rows_of(
    alerts: Iterable[Alert], active: Collection[str], blind: Mapping[str, str] | None = None
) -> list[RuleHealth]:
    """Return a row for each rule that raised an alert, was active, or is active by default."""
    found = collections.defaultdict(list)
    for alert in alerts:
        if alert.rule != WHY:  # it explains another one
            found[alert.rule].append(alert)
    default = (rule.__name__ for rule in default_rules())
    names = dict.fromkeys([*found, *default, *sorted(active)])
    rows = [_row(rule, found[rule], rule in active, (blind or {}).get(rule)) for rule in names]
    # rules over steps name causes, those over statistics what follows from them
    causes = {rule.__name__ for rule in default_rules() if hasattr(rule, "of_steps")}
    states = list(_STYLES)
    return sorted(rows, key=lambda row: (states.index(row.state), row.rule not in causes))


def _row(rule: str, alerts: list[Alert], is_active: bool, why_not: str | None) -> RuleHealth:
    words = looks_for(rule), REMEDIES.get(rule, "")
    if not alerts and why_not is not None:
        return RuleHealth(rule, "blind", *words, message=why_not)
    if not alerts:
        return RuleHealth(rule, "fine" if is_active else "unknown", *words)
    problems = [alert for alert in alerts if alert.severity != HINT and rule not in LIMITS]
    first = min(problems or alerts, key=lambda alert: alert.step)
    if rule in LIMITS:
        return RuleHealth(rule, "blind", *words, name=first.name, message=first.message)
    return RuleHealth(
        rule, "problem" if problems else "hint", *words, len(alerts), first.name,
        first.kind.value, first.step, first.rank, first.message, _places_beside(first, alerts),
    )  # fmt: skip


def _places_beside(first: Alert, alerts: list[Alert]) -> tuple[str, ...]:
    """Return up to two other places of the step and rank of the first alert."""
    here = (a.name for a in alerts if (a.step, a.rank) == (first.step, first.rank))
    return tuple(dict.fromkeys(name for name in here if name != first.name))[:2]


def summary_of(rows: Sequence[RuleHealth]) -> str:
    """Return how many rules found something, as words."""
    counts = {state: sum(row.state == state for row in rows) for state in _WORDS}
    found = [f"{count} {_WORDS[state]}" for state, count in counts.items() if count]
    return f"of {len(rows)} rules, {', '.join(found)}"


def health_text(rows: Sequence[RuleHealth], *, all_rules: bool = True) -> Text:
    """Return what the rules have found, where, since when, and what to do.

    Without `all_rules` it has at most eight lines, and does not name rules that found nothing.
    """
    shown = Text()
    found = [row for row in rows if row.alerts]
    lines = len(found) * 2 if all_rules else _MOST_LINES
    for number, row in enumerate(found):
        left = len(found) - number
        if lines < left and lines == 1:
            rest = ", ".join(each.rule for each in found[number:])
            shown.append(plain(f"  and {left} more: {rest}", 300) + "\n", "dim")
            break
        shown.append("● ", _STYLES[row.state])
        shown.append(plain(f"{row.rule}: {_place(row)}", 300) + "\n")
        lines -= 1
        if lines >= left:
            lines -= 1
            shown.append(f"  {plain(row.message, 600)}")
            end = "" if row.message.endswith("?") else "."
            shown.append(f"{end} {row.remedy}" if row.remedy else "", "dim")
            shown.append("\n")
    for state, words in _OTHERS if all_rules else _OTHERS[:1]:
        if names := _names(rows, state):
            shown.append("● " if state == "fine" else "○ ", _STYLES[state])
            shown.append(plain(f"{words}: {names}", 4000) + "\n", "dim")
    return shown


def health_html(rows: Sequence[RuleHealth]) -> str:
    """Return the same as markup."""
    found = "".join(_html_row(row) for row in rows if row.alerts)
    heads = "".join(f"<th>{head}</th>" for head in ("", "rule", "where", "what to do"))
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{found}</tbody></table>"
    others = "".join(
        f'<p class="dim">{_light(state)} {words}: {escape(names, 4000)}</p>'
        for state, words in _OTHERS
        if (names := _names(rows, state))
    )
    return (f'<div class="scroll">{table}</div>' if found else "") + others


def report_sections(report: RunReport) -> Iterator[Section]:
    """Yield the section of a report about rules."""
    rows = health_of(report.table, report.reader, report.alerts)
    yield 10, section("Health", health_html(rows), f"{summary_of(rows)}.")


def _html_row(row: RuleHealth) -> str:
    return (
        f'<tr><td>{_light(row.state)}</td><td class="mono">{escape(row.rule)}</td>'
        f"<td>{escape(_place(row))}</td>"
        f'<td>{escape(row.message)}<div class="dim">{escape(row.remedy)}</div></td></tr>'
    )


def _light(state: State) -> str:
    return f'<span class="light {state}" role="img" aria-label="{state}"></span>'


def _place(row: RuleHealth) -> str:
    rank = f", rank {row.rank}" if row.rank else ""
    left = row.alerts - 1 - len(row.also)
    more = f", and {left:,} more" if left else ""
    return f"{', '.join((row.name, *row.also))} since step {row.step:,}{rank}{more}"


def _names(rows: Sequence[RuleHealth], state: State) -> str:
    """Return the rules in a state; those that could not look by their reasons."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.state == state:
            reasons.setdefault(row.message, []).append(row.rule)
    named = (", ".join(rules) + (f" ({why})" if why else "") for why, rules in reasons.items())
    return "; ".join(named)
