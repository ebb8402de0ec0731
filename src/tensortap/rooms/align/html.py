"""Write an alignment as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tensortap.rooms.align.picture import alignment_figure
from tensortap.rooms.align.result import Alignment, WorstToken, finding_lines
from tensortap.rooms.report.html_file import (
    HtmlReport,
    escape,
    header,
    html_table,
    section,
    write_html_file,
)

_NAMES = 500


def write_html(found: Alignment, path: str | Path) -> Path:
    """Write a report into a file."""
    made = HtmlReport()
    page = made.page(f"{found.verdict} · tensortap align", "\n".join(_parts(found, made)))
    return write_html_file(path, page)


def _parts(found: Alignment, made: HtmlReport) -> Iterator[str]:
    verdict = f"{'✓' if found else '✗'} {found.verdict}"
    counts = [("tokens of A", found.tokens_a), ("tokens of B", found.tokens_b)]
    counts += [("in both", found.matched)]
    sides = [("A", found.a), ("B", found.b)]
    yield header(verdict, "agree" if found else "differ", sides, counts)
    yield "<main>"
    lines = "".join(f"<p>{escape(line)}</p>" for line in finding_lines(found))
    yield section("Findings", lines)
    figure = made.figure(alignment_figure(found), "layers by tokens, colored by difference")
    note = "One column per token, sequence by sequence; one row per layer, in order of execution."
    figure = f'<div class="scroll"><div style="min-width:640px">{figure}</div></div>'
    yield section("Tokens by layers", figure, note)
    if found.worst:
        heads = ["token", "place", "A", "B", "context"]
        table = html_table(map(_worst, found.worst), heads, numbers=[0, 1, 2, 3])
        yield section("Tokens that are farthest apart", table)
    heads = ["name", "kind", "rows", "mean", "largest", "verdict"]
    rows = [
        (e.name, e.kind, f"{e.rows:,}", f"{e.mean:.3g}", f"{e.largest:.3g}", e.verdict)
        for e in found.names[:_NAMES]
    ]
    table = html_table(rows, heads, numbers=[2, 3, 4])
    yield section("Names", table, f"The first {_NAMES}." if len(found.names) > _NAMES else "")
    yield "</main>"


def _worst(each: WorstToken) -> tuple[object, ...]:
    context = each.text or " ".join(map(str, each.context))
    return each.token, each.place, f"{each.a:.5g}", f"{each.b:.5g}", context
