"""Render comparisons for terminals and notebooks."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tensortap.core.files import plain
from tensortap.rooms.compare.provenance import rows_of
from tensortap.rooms.compare.report import CompareReport, Difference, missing_rows
from tensortap.rooms.compare.result import Comparison
from tensortap.text.tensors import FittedTable

_ROWS = 30
_WIDE = 110  # terminal width with room for all figures and the reason


def report_text(report: CompareReport, most: int = _ROWS) -> Group:
    """Render a report: the verdict, the environments, the first difference, and all others."""
    parts: list[RenderableType] = [_headline(bool(report), report.a, report.b)]
    parts.append(Text(report.counts))
    for section in (_provenance(report), _first(report), _differences(report, most)):
        if section is not None:
            parts += [Text(), section]
    if report.missing:
        parts += [Text(), _missing(report, max(1, most // 2))]
    return Group(*parts)


def comparison_text(found: Comparison, a: str, b: str, most: int = _ROWS) -> Group:
    """Render the comparison of two files or values, with their differing parts."""
    verdict: list[RenderableType] = [_headline(bool(found), a, b), Text(plain(found.line))]
    if not found.parts:
        return Group(*verdict)
    table = figure_table("path", "max|Δ|", "relative", "cosine", "differ", "why")
    for part in found.parts[:most]:
        name = Text(plain(part.path), style="bold")
        table.add_row(name, *figures_of_row(part), Text(_why(part)))
    return Group(*verdict, Text(), table, *_more(found.differing - min(most, len(found.parts))))


def report_as_plain_text(report: CompareReport) -> str:
    """Render a report without colors, wide enough for long names."""
    file = io.StringIO()
    # rich would display it itself in a notebook, a second time
    console = Console(file=file, width=160, color_system=None, force_jupyter=False)
    console.print(report_text(report, 15))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _headline(agree: bool, a: str, b: str) -> Text:
    verdict = Text("✓ agree", style="bold green") if agree else Text("✗ differ", style="bold red")
    return Text.assemble(verdict, "   ", (plain(a), "bold"), " and ", (plain(b), "bold"))


def _provenance(report: CompareReport, most: int = 12) -> RenderableType | None:
    rows = rows_of(report.provenance)
    if not rows:
        return None
    table = figure_table("around them", "first", "second")
    for row in rows[:most]:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return Group(table, *_more(len(rows) - most))


def _first(report: CompareReport) -> RenderableType | None:
    grid = Table.grid(padding=(0, 2))
    first = report.first
    if first is not None:
        grid.add_row(Text("first", style="bold red"), Text(plain(str(first.key)), style="bold"))
        how = first.comparison.line + (f"  (by {first.by})" if first.by != "value" else "")
        grid.add_row("", Text(plain(how)))
        for explanation in first.explanations:
            grid.add_row(Text("because", style="yellow"), Text(plain(explanation)))
    for label, style, text in (
        ("culprit", "yellow", report.culprit.removeprefix("culprit: ")),
        ("bitwise", "yellow", report.bitwise_text),
    ):
        if text:
            grid.add_row(Text(label, style=style), Text(plain(text)))
    return grid if grid.row_count else None


def _differences(report: CompareReport, most: int) -> RenderableType | None:
    if not report.differences:
        return None
    shown = report.differences[:most]
    table = FittedTable(lambda width: _difference_table(shown, width))
    return Group(table, *_more(len(report.differences) - most))


def _difference_table(shown: tuple[Difference, ...], width: int) -> Table:
    """Render differences; a narrow terminal gets one line each with fewer figures."""
    ranked = any(each.key.rank for each in shown)
    why = any(_why(each.comparison) for each in shown)
    figures = ("max|Δ|", "relative", "cosine", "differ")
    narrow = why and width < _WIDE
    kept = (figures[0], figures[3]) if narrow else figures
    table = figure_table(
        "step", *(["rank"] if ranked else []), "name", "kind", *kept, *(["why"] if why else []),
    )  # fmt: skip
    if narrow:
        reason = table.columns[-1]
        reason.no_wrap, reason.overflow, reason.max_width = True, "ellipsis", width - 56
    for each in shown:
        key = each.key
        cells: list[RenderableType] = [f"{key.step}·{key.call}" if key.call else str(key.step)]
        if ranked:
            cells.append("all" if key.rank < 0 else str(key.rank))
        cells += [Text(plain(key.name), style="bold"), Text(key.kind, style="dim")]
        found = dict(zip(figures, figures_of_row(each.comparison), strict=True))
        cells += [found[name] for name in kept]
        if why:
            cells.append(Text(_why(each.comparison)))
        table.add_row(*cells)
    return table


def figures_of_row(found: Comparison) -> Iterator[str]:
    """Return max|Δ|, relative difference, cosine, and the share that differs."""
    measured = bool(found.max_abs or found.max_rel)
    relative = found.rel_l2 if found.rel_l2 is not None else found.max_rel
    yield f"{found.max_abs:.3g}" if measured else ""
    yield f"{relative:.3g}" if measured else ""
    yield f"{found.cosine:.6g}" if found.cosine is not None and found.count > 1 else ""
    yield f"{found.share:.1%}" if found.mismatches else ""


def _why(found: Comparison) -> str:
    """Return what the figures do not say."""
    said = [found.reason] if found.nonfinite or not found.mismatches else []
    return plain(", ".join(filter(None, [*said, *found.notes])))


def _missing(report: CompareReport, most: int) -> RenderableType:
    title = "missing, which is allowed" if report.allow_missing else "missing"
    table = figure_table(title, "kind", "records", "steps", "rank", "")
    found = missing_rows(report.missing)
    for row in found[:most]:
        table.add_row(*(Text(plain(cell)) for cell in row))
    parts: list[RenderableType] = [table, *_more(len(found) - most)]
    if len({each.side for each in report.missing}) > 1:
        parts.append(Text("mapping=['pattern=replacement'] renames names of the first run"))
    return Group(*parts)


def figure_table(*columns: str) -> Table:
    """Return an empty table in the style of all comparisons; columns of numbers are aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold dim", expand=False)
    right = {"step", "rank", "max|Δ|", "relative", "cosine", "differ", "records"}
    for column in columns:
        number = column in right
        table.add_column(
            column, justify="right" if number else "left", overflow="fold",
            min_width=20 if column == "name" else None, no_wrap=number or column == "kind",
        )  # fmt: skip
    return table


def _more(count: int) -> list[RenderableType]:
    return [Text(f"… and {count:,} more", style="dim")] if count > 0 else []
