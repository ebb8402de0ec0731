"""The table of peers in the documentation."""

from __future__ import annotations

from bench.harness import Row


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a table of the rows beside peers; none if there are none.

    Rows on the same work in several sizes share a line. The table has ratios only: times depend on
    the machine.
    """
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.peer:
            work, _, peer = row.name.partition(" ÷ ")
            what, _, size = work.rpartition(", ")
            if not size.endswith(" MiB"):
                what, size = work, ""
            groups.setdefault((what, peer), {})[size.removesuffix(" MiB")] = row
    lines = [_line(what, peer, group) for (what, peer), group in groups.items()]
    titles = ["| Work | peer | ratio | measured |", "| --- | --- | --- | --- |"]
    return [*titles, *lines] if lines else []


def _line(what: str, peer: str, group: dict[str, Row]) -> str:
    first = next(iter(group.values()))
    name, _, version = first.peer.partition(" ")
    peer = f"{peer} {version}" if name in (peer, f"{peer}-sdk") else f"{peer} ({first.peer})"
    sizes = " · ".join(group)
    work = f"{what}, {sizes} MiB" if sizes else what
    ratios = " · ".join(map(_ratio, group.values()))
    note = first.note if len(group) == 1 else first.note.partition(";")[0]  # then: of one size
    return f"| {work} | {peer} | {ratios} | {note} |"


def _ratio(row: Row) -> str:
    """Return the ratio, bold where the peer is better; nothing if the peer is missing."""
    if row.ratio != row.ratio:
        return ""
    better = row.ratio > 1 if row.at_most else row.ratio < 1
    return f"**{row.ratio:.2g}**" if better else f"{row.ratio:.2g}"
