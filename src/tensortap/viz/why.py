"""The explanation of an alert, for a terminal and for a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.text import Text

from tensortap.alerts import Alert
from tensortap.alerts.explanation import OperandSummary, OperationExplanation
from tensortap.files import plain
from tensortap.text.tensors import bars, number, short_dtype
from tensortap.viz.figures import operand_figure
from tensortap.viz.figures.encoding import Figure
from tensortap.viz.html_file import escape, html_table

_LONGEST = 4000  # characters of a verdict


def element_rows(found: OperationExplanation) -> list[list[str]]:
    """Return the first bad elements: index, and the value of each operand there."""
    return [[str(list(each.index)), *each.values] for each in found.elements]


def operand_names(found: OperationExplanation) -> list[str]:
    """Return the names of the operands, the output last."""
    return [each.name for each in found.operands]


# -- terminal ---------------------------------------------------------------------------------


def why_text(alert: Alert) -> Text:
    """Return the verdict, the lines, the operands, the bad elements and the chain."""
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
    for number_, line in enumerate(found.source, found.first_line):
        here = number_ == found.line
        yield f"{'>' if here else ' '} {number_:>5} │ {line}", "bold red" if here else ""
    yield "", ""
    of = f" of {found.module}" if found.module else ""
    yield f"{found.operation}{of}, {found.phase}: {found.why}", "bold"
    width = max(map(len, operand_names(found)), default=0)
    for operand in found.operands:
        yield from _operand(operand, width)
    if found.elements:
        yield "", ""
        few = f", the first {len(found.elements)}" if found.bad > len(found.elements) else ""
        yield f"bad elements: {found.bad:,}{few}", "bold"
    for index, *values in element_rows(found):
        pairs = zip(operand_names(found), values, strict=False)
        *given, made = [f"{name} {value}" for name, value in pairs if value] or [""]
        yield f"  {index}  {', '.join(given)} → {made}" if given else f"  {index}  {made}", ""
    if found.chain:
        yield "", ""
        yield "what led there", "bold"
    for link in found.chain:
        yield f"  {link.name}  {link.output}", ""
        if link.line:
            yield f"    {link.line}  {link.code}", "dim"


def _operand(operand: OperandSummary, width: int) -> Iterator[tuple[str, str]]:
    shape = f"[{', '.join(map(str, operand.shape))}] {short_dtype(operand.dtype)}"
    head = f"  {operand.name:<{width}}  {shape}"
    if operand.counts:
        head += f"  {number(operand.low, 4)} "
        end = f" {number(operand.high, 4)}"
    counted = ((operand.nans, "NaN"), (operand.posinfs, "+Inf"), (operand.neginfs, "-Inf"))
    others = "".join(f"  {count:,} {word}" for count, word in counted if count)
    if not operand.counts:
        yield head + (others or "  values not kept"), "red" if others else ""
        return
    yield head + bars(operand.counts) + end + others, "red" if operand.is_output else ""
    if any(operand.marked):
        marks = "".join("^" if count else " " for count in operand.marked)
        yield f"{' ' * len(head)}{marks}  {sum(operand.marked):,} went into bad elements", "red"


# -- report -----------------------------------------------------------------------------------


def why_html(alert: Alert, draw: Callable[[Figure, str], str]) -> str:
    """Return the explanation as HTML; `draw` registers a figure and returns its element."""
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
    figures = (draw(operand_figure(each), f"values of {each.name}") for each in found.operands)
    content += f'<div class="operands">{"".join(figures)}</div>'
    if found.elements:
        few = f"<h3>Bad elements: {found.bad:,}</h3>"
        content += few + html_table(element_rows(found), ["index", *operand_names(found)])
    if found.chain:
        rows = [[link.name, link.output, link.line, link.code] for link in found.chain]
        heads = ["operation", "made", "line", "code"]
        content += f"<h3>What led there</h3>{html_table(rows, heads)}"
    return content
