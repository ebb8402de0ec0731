"""Draw docs/images/flow.svg: python docs/images/flow.py."""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 960, 330
# label, folder, column, row
TRAINING = [
    ("value", "your tensor", 0),
    ("source", "sources/", 1),
    ("selection", "pipeline/", 2),
    ("snapshot", "frameworks/", 3),
    ("Record", "record.py", 4),
    ("queue", "pipeline/", 5),
]
SINKS = [
    ("live", "sinks/live.py", "wire/ → server/", "history"),
    ("store", "sinks/store.py", "runs/", "run folder"),
    ("worker", "sources/worker.py", "your code, films/", "files"),
    ("memory", "sinks/memory.py", "", "this process"),
]
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1c2733; }
  .small { font-size: 11px; fill: #5b6b7b; }
  .box { fill: #ffffff; stroke: #5b6b7b; }
  .zone { fill: #eef3f8; stroke: none; }
  .line { stroke: #5b6b7b; fill: none; marker-end: url(#tip); }
  .title { font-weight: 600; }
"""


def box(x: int, y: int, width: int, title: str, subtitle: str) -> str:
    """Return a box with two lines of text."""
    middle = x + width // 2
    return (
        f'<rect class="box" x="{x}" y="{y}" width="{width}" height="44" rx="6"/>'
        f'<text class="title" x="{middle}" y="{y + 19}" text-anchor="middle">{title}</text>'
        f'<text class="small" x="{middle}" y="{y + 35}" text-anchor="middle">{subtitle}</text>'
    )


def line(x1: int, y1: int, x2: int, y2: int) -> str:
    """Return an arrow."""
    return f'<path class="line" d="M{x1} {y1} L{x2} {y2}"/>'


def flow() -> str:
    """Return the picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f"<style>{STYLE}</style>",
        (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#5b6b7b"/>'
        ),
        "</marker></defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        '<rect class="zone" x="8" y="8" width="944" height="92" rx="8"/>',
        '<text class="small" x="20" y="26">training thread</text>',
        '<rect class="zone" x="8" y="108" width="560" height="214" rx="8"/>',
        '<text class="small" x="44" y="126">background threads, other processes, disk</text>',
        '<rect class="zone" x="576" y="108" width="376" height="214" rx="8"/>',
        '<text class="small" x="588" y="126">people</text>',
    ]
    for title, folder, column in TRAINING:
        x = 24 + column * 156
        parts.append(box(x, 40, 124, title, folder))
        if column:
            parts.append(line(x - 32, 62, x, 62))
    parts.append(
        '<path class="line" d="M866 84 L866 104 L24 104 L24 136" style="marker-end: none"/>'
    )
    for row, (title, folder, through, where) in enumerate(SINKS):
        y = 136 + row * 46
        parts.append(f'<path class="line" d="M24 136 L24 {y + 20} L40 {y + 20}"/>')
        parts.append(
            f'<rect class="box" x="40" y="{y}" width="150" height="40" rx="6"/>'
            f'<text class="title" x="52" y="{y + 17}">{title}</text>'
            f'<text class="small" x="52" y="{y + 32}">{folder}</text>'
        )
        parts.append(f'<text class="small" x="208" y="{y + 24}">{through}</text>')
        parts.append(line(320, y + 20, 340, y + 20))
        parts.append(
            f'<rect class="box" x="340" y="{y}" width="104" height="40" rx="6"/>'
            f'<text x="392" y="{y + 24}" text-anchor="middle">{where}</text>'
        )
        if title != "worker":  # its files are films, not records
            parts.append(line(444, y + 20, 470, 226))
    parts.append(box(470, 204, 88, "reader", "readers/"))
    parts.append(line(558, 226, 592, 226))
    parts.append(box(592, 204, 88, "table", "table/"))
    for row, (title, folder) in enumerate(
        [
            ("compare", "compare/"),
            ("figures, reports", "viz/"),
            ("page", "web/"),
            ("Python, shell", "api/ cli/"),
        ]
    ):
        y = 136 + row * 46
        parts.append(line(680, 226, 752, y + 20))
        parts.append(
            f'<rect class="box" x="752" y="{y}" width="180" height="40" rx="6"/>'
            f'<text class="title" x="764" y="{y + 24}">{title}</text>'
            f'<text class="small" x="920" y="{y + 24}" text-anchor="end">{folder}</text>'
        )
    return "\n".join([*parts, "</svg>"])


if __name__ == "__main__":
    Path(__file__).with_name("flow.svg").write_text(flow() + "\n")
