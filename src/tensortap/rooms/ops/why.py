"""The explanation of an alert, for a terminal and for a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from tensortap.alerts.alert import Alert
from tensortap.core.files import plain
from tensortap.rooms.ops.explanation import OperationExplanation
from tensortap.rooms.ops.verdicts import verdict_of
from tensortap.rooms.report.html_file import escape, html_table, section

if TYPE_CHECKING:
    from tensortap.rooms.report.run_report import RunReport, Section

_LONGEST = 4000  # characters of a verdict


# -- terminal ---------------------------------------------------------------------------------


def why_text(alert: Alert) -> Text:
    """Return the verdict, the lines, the operands and the chain."""
    shown = Text(plain(alert.message, _LONGEST) + "\n")
    if alert.explanation is None:
        return shown
    for line, style in _lines(alert.explanation):
        shown.append(plain(line, _LONGEST) + "\n", style)
    return shown


def _lines(found: OperationExplanation) -> Iterator[tuple[str, str]]:
    inside = f" in {found.function}" if found.function else ""
    if found.place:
        yield "", ""
        yield f"{found.place}{inside}", "bold"
    for number, line in enumerate(found.source, found.first_line):
        here = number == found.line
        yield f"{'>' if here else ' '} {number:>5} │ {line}", "bold red" if here else ""
    yield "", ""
    of = f" of {found.module}" if found.module else ""
    yield f"{found.operation}{of}, {found.phase}: {found.why}", "bold"
    width = max((len(each.name) for each in found.operands), default=0)
    for operand in found.operands:
        yield f"  {operand.name:<{width}}  {operand.values}", ""
    if found.chain:
        yield "", ""
        yield "what led there", "bold"
    for link in found.chain:
        yield f"  {link.name}  {link.output}", ""
        if link.line:
            yield f"    {link.line}  {link.code}", "dim"


# -- report -----------------------------------------------------------------------------------


def report_sections(report: RunReport) -> Iterator[Section]:
    """Yield the section of a report that explains the newest non-finite value."""
    verdict = verdict_of(report.alerts)
    if verdict is not None:
        yield 30, section("Why", why_html(verdict))


def why_html(alert: Alert) -> str:
    content = f"<p>{escape(alert.message, _LONGEST)}</p>"
    found = alert.explanation
    if found is None:
        return content
    if found.source:
        lines = "".join(
            f"<mark>{escape(f'{at:>5}  {line}')}</mark>\n"
            if at == found.line
            else f"{escape(f'{at:>5}  {line}')}\n"
            for at, line in enumerate(found.source, found.first_line)
        )
        content += f'<p class="dim mono">{escape(found.place)}</p><pre>{lines}</pre>'
    if found.operands:
        content += html_table([[each.name, each.values] for each in found.operands], ["", "values"])
    if found.chain:
        rows = [[link.name, link.output, link.line, link.code] for link in found.chain]
        heads = ["operation", "made", "line", "code"]
        content += f"<h3>What led there</h3>{html_table(rows, heads)}"
    return content
