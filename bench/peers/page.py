"""The table of peers in the documentation."""

from __future__ import annotations

from bench.harness import Row


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a table of the rows beside peers; none if there are none."""
    lines = [_line(row) for row in rows if row.peer]
    titles = ["| Work | tensortap | peer | ratio | measured |", "| --- | --- | --- | --- | --- |"]
    return [*titles, *lines] if lines else []


def _line(row: Row) -> str:
    work, _, peer = row.name.partition(" ÷ ")
    name, _, version = row.peer.partition(" ")
    peer = f"{peer} {version}" if name in (peer, f"{peer}-sdk") else f"{peer} ({row.peer})"
    facts = row.as_dict()
    if row.ratio != row.ratio:
        return f"| {work} | | {row.peer} | | {row.note} |"
    ours, theirs = (_quantity(float(str(facts[key])), row.unit) for key in ("ours", "base"))
    better = row.ratio > 1 if row.at_most else row.ratio < 1
    ratio = f"**{row.ratio:.2g}**" if better else f"{row.ratio:.2g}"
    return f"| {work} | {ours} | {peer}: {theirs} | {ratio} | {row.note} |"


def _quantity(value: float, unit: str) -> str:
    """Return a time or a rate with its unit.

    >>> _quantity(0.0123, "s"), _quantity(2.5e9, "B/s")
    ('12 ms', '2.5 GB/s')
    """
    if unit == "B/s":
        return f"{value / 1e9:.2g} GB/s"
    factor, name = (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
    return (
        f"{value * factor:.2g} {name}" if value * factor < 100 else f"{value * factor:.0f} {name}"
    )
