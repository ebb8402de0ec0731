"""The health of a run, for a terminal, a report and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from tensortap.core.files import plain
from tensortap.core.record import Kind
from tensortap.rooms.figures.figures import sparkline
from tensortap.rooms.figures.html_file import details, escape, section
from tensortap.rooms.health.rule_health import RuleHealth, State, health_of
from tensortap.table.table import Table, locked
from tensortap.text.tensors import number

if TYPE_CHECKING:
    from tensortap.rooms.figures.run_report import RunReport, Section

_MAX_QUANTITIES = 400  # in a report
_STYLES: dict[State, str] = {"problem": "red", "hint": "yellow", "fine": "green", "unknown": "dim"}
_OTHERS: tuple[tuple[State, str], ...] = (("fine", "fine"), ("unknown", "not active"))
_WIDTH, _HEIGHT = 96, 24  # of small lines


class QuantityLine(NamedTuple):
    """A quantity of a layer over all steps: a small SVG path, and the last number."""

    name: str
    quantity: str
    path: str
    last: str


def by_layer(names: Iterable[str]) -> list[str]:
    """Return names of numbers in the order of layers: the model first, parameters in their module.

    >>> by_layer(["b.weight.update_norm", "a.kurtosis", "b.kurtosis", "model.grad_norm"])
    ['model.grad_norm', 'b.kurtosis', 'b.weight.update_norm', 'a.kurtosis']
    """
    first: dict[str, int] = {}  # position of each module, at its first appearance

    def place(name: str) -> tuple[bool, list[int]]:
        parts = name.split(".")[:-1]
        modules = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        return parts != ["model"], [first.setdefault(each, len(first)) for each in modules]

    return sorted(names, key=place)


@locked
def layer_lines(
    table: Table, names: Sequence[str] | None = None, rank: int | None = None
) -> dict[str, list[QuantityLine]]:
    """Return what analyses have recorded of each layer: layer → its quantities.

    `names` are the records to show, by default all.
    """
    lines: dict[str, list[QuantityLine]] = {}
    for name in table.layers(Kind.HEALTH.value) if names is None else names:
        layer, _, quantity = name.rpartition(".")
        rows = table.series(Kind.HEALTH.value, name, rank)
        values = table.column("value")[rows]
        path = sparkline(values, width=_WIDTH, height=_HEIGHT, steps=table.step[rows])
        last = number(float(values[-1])) if len(values) else ""
        lines.setdefault(layer, []).append(QuantityLine(name, quantity, path, last))
    return lines


def summary_of(rows: Sequence[RuleHealth]) -> str:
    """Return how many rules found something, as words.

    >>> summary_of([RuleHealth("nan", "fine", "values that are NaN", "")])
    'of 1 rules, 1 found nothing'
    """
    words: dict[State, str] = {
        "problem": "found a problem", "hint": "gave a hint", "fine": "found nothing",
        "unknown": "not active",
    }  # fmt: skip
    counts = {state: sum(row.state == state for row in rows) for state in words}
    found = [f"{count} {words[state]}" for state, count in counts.items() if count]
    return f"of {len(rows)} rules, {', '.join(found)}"


def health_text(rows: Sequence[RuleHealth]) -> Text:
    """Return what the rules have found, where, since when, and what to do."""
    shown = Text()
    for row in rows:
        if row.alerts:
            shown.append("● ", _STYLES[row.state])
            shown.append(f"{row.rule}: {plain(_place(row), 300)}\n")
            shown.append(f"  {plain(row.message, 600)}\n")
            shown.append(f"  {row.remedy}\n" if row.remedy else "", "dim")
    for state, words in _OTHERS:
        if names := _names(rows, state):
            shown.append("● " if state == "fine" else "○ ", _STYLES[state])
            shown.append(f"{words}: {names}\n", "dim")
    return shown


def health_html(rows: Sequence[RuleHealth]) -> str:
    """Return the same as markup."""
    found = "".join(_html_rows(rows))
    heads = "".join(f"<th>{head}</th>" for head in ("", "rule", "where", "what to do"))
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{found}</tbody></table>"
    others = "".join(
        f'<p class="dim">{_light(state)} {words}: {escape(names, 4000)}</p>'
        for state, words in _OTHERS
        if (names := _names(rows, state))
    )
    return (f'<div class="scroll">{table}</div>' if found else "") + others


def layers_html(lines: dict[str, list[QuantityLine]]) -> str:
    """Return the quantities of layers as small lines."""
    return "".join(
        f'<h3 class="mono">{escape(layer)}</h3><div class="multiples">'
        f"{''.join(map(_html_line, own))}</div>"
        for layer, own in lines.items()
    )


def report_sections(report: RunReport) -> Iterator[Section]:
    """Yield the sections of a report about rules and about layers."""
    rows = health_of(report.table, report.reader, report.alerts)
    yield 10, section("Health", health_html(rows), f"{summary_of(rows)}.")
    names = by_layer(report.table.layers(Kind.HEALTH.value))
    if not names:
        return
    shown = layers_html(layer_lines(report.table, names[:_MAX_QUANTITIES]))
    title = f"{len(names):,} quantities"
    if len(names) > _MAX_QUANTITIES:
        title += f", of which the first {_MAX_QUANTITIES:,} are here; the page has all"
    note = "What analyses recorded over the steps, and the last number."
    yield 70, section("Health of layers", details(title, shown), note)


def _html_line(line: QuantityLine) -> str:
    return (
        f'<figure><figcaption>{escape(line.quantity)} <b class="mono">{escape(line.last)}</b>'
        f'</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
        f'aria-hidden="true"><path d="{line.path}"/></svg></figure>'
    )


def _html_rows(rows: Sequence[RuleHealth]) -> Iterator[str]:
    for row in rows:
        if row.alerts:
            yield (
                f'<tr><td>{_light(row.state)}</td><td class="mono">{escape(row.rule)}</td>'
                f"<td>{escape(_place(row))}</td>"
                f'<td>{escape(row.message)}<div class="dim">{escape(row.remedy)}</div></td></tr>'
            )


def _light(state: State) -> str:
    return f'<span class="light {state}" role="img" aria-label="{state}"></span>'


def _place(row: RuleHealth) -> str:
    rank = f", rank {row.rank}" if row.rank else ""
    more = f", and {row.alerts - 1:,} more" if row.alerts > 1 else ""
    return f"{row.name} since step {row.step:,}{rank}{more}"


def _names(rows: Sequence[RuleHealth], state: State) -> str:
    return ", ".join(row.rule for row in rows if row.state == state)
