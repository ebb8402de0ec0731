"""The table of peers in the documentation."""

from __future__ import annotations

from bench.harness import Row


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a table of the rows beside peers; none if there are none.

    Rows on the same work in several sizes share a line.
    """
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.peer:
            work, _, peer = row.name.partition(" ÷ ")
            what, _, size = work.rpartition(", ")
            if not size.endswith("MiB"):
                what, size = work, ""
            groups.setdefault((what, peer), {})[size] = row
    lines = [_line(what, peer, group) for (what, peer), group in groups.items()]
    titles = ["| Work | tensortap | peer | ratio | measured |", "| --- | --- | --- | --- | --- |"]
    return [*titles, *lines] if lines else []


def _line(what: str, peer: str, group: dict[str, Row]) -> str:
    first = next(iter(group.values()))
    name, _, version = first.peer.partition(" ")
    peer = f"{peer} {version}" if name in (peer, f"{peer}-sdk") else f"{peer} ({first.peer})"
    work = ", ".join(filter(None, (what, " · ".join(group))))
    if first.ratio != first.ratio:
        return f"| {work} | | {first.peer} | | {first.note} |"
    cells = [_cells(row) for row in group.values()]
    ours, theirs, ratios = (" · ".join(texts) for texts in zip(*cells, strict=True))
    note = first.note if len(group) == 1 else first.note.partition(";")[0]  # then: of one size
    return f"| {work} | {ours} | {peer}: {theirs} | {ratios} | {note} |"


def _cells(row: Row) -> tuple[str, str, str]:
    """Return our quantity, that of the peer, and the ratio, bold where the peer is better."""
    facts = row.as_dict()
    ours, theirs = (_quantity(float(str(facts[key])), row.unit) for key in ("ours", "base"))
    better = row.ratio > 1 if row.at_most else row.ratio < 1
    return ours, theirs, f"**{row.ratio:.2g}**" if better else f"{row.ratio:.2g}"


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
