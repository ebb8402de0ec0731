"""Tables of the documentation that rows are written into."""

from __future__ import annotations

import pathlib

from bench import budgets, compiled, load, track
from bench.harness import Row
from bench.peers import page as peers

DOCS = pathlib.Path(__file__).parents[1] / "docs"
END = "<!-- end -->"


def write_tables(rows: list[Row]) -> list[pathlib.Path]:
    """Write every table whose rows were measured; return the pages that were changed."""
    tables = (
        (DOCS / "peers.md", "measured", peers.table(rows)),
        (DOCS / "track.md", "compiled bits", compiled.bits_table(rows)),
        (DOCS / "costs.md", "small models", track.small_models_table(rows)),
        (DOCS / "costs.md", "load", load.table(rows)),
        (DOCS / "steer.md", "budgets", budgets.table(rows)),
    )
    changed = [(page, name, lines) for page, name, lines in tables if lines]
    for page, name, lines in changed:
        begin = f"<!-- {name} -->\n"
        before, _, rest = page.read_text().partition(begin)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n\n{END}{after}")
    return sorted({page for page, _, _ in changed})
