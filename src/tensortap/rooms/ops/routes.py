"""The routes for the operations of modules and for verdicts."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Kind, Record
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.figures.routes import at_or_before
from tensortap.rooms.ops.verdicts import NO_VERDICT, verdict_of
from tensortap.runs.rows import HEAD_COLUMNS, records_of
from tensortap.text.records import record_line

_MAX_OPEN = 50  # modules
_NAME = re.compile(r"(.*?):(?:(?:backward|recompute|optimizer):)?\d+:", re.DOTALL)


def operations(request: PageRequest) -> dict[str, Any]:
    """Return the modules whose operations were recorded at a step, and those of `module`."""
    table = request.entry.table()
    with table.lock:
        if Kind.OP.value not in table.index().kinds:
            return {"modules": [], "operations": {}}
        step = at_or_before(table.steps(Kind.OP.value), request.integer("step"))
        table = table.at_step(step)
        code = table.kinds.index(Kind.OP.value)
        rows = np.flatnonzero((table.kind == code) & (table.step == step))
        ranks = np.unique(table.rank[rows]).tolist()
        wanted = request.text("rank")
        rank = int(wanted) if wanted.isdecimal() and int(wanted) in ranks else ranks[0]
        rows = rows[table.rank[rows] == rank]
        rows = rows[np.argsort(table.seq[rows], kind="stable")]
        of_module: dict[str, list[int]] = {}
        for row, name in zip(rows.tolist(), table.name[rows].tolist(), strict=True):
            of_module.setdefault(_module_of(table.names[name]), []).append(row)
        bad = set(rows[table.nonfinite(rows) > 0].tolist())
        listed = [
            {"name": name, "count": len(own), "bad": len(bad.intersection(own))}
            for name, own in list(of_module.items())[:5000]
        ]
        opened = [name for name in request.texts("module") if name in of_module][:_MAX_OPEN]
        chosen = {name: np.array(of_module[name][:1000]) for name in opened}
        found = {
            name: [_operation(each) for each in records_of(table.take(own, HEAD_COLUMNS))]
            for name, own in chosen.items()
        }
    return {"step": step, "rank": rank, "modules": listed, "operations": found}


def _module_of(name: str) -> str:
    """Return the module, or the function, in the name of an operation's record."""
    found = _NAME.match(name)
    return found[1] if found else name


def _operation(record: Record) -> dict[str, Any]:
    stats, tags = record.stats, record.tags
    keys = ("op", "phase", "index", "line", "function", "parameter", "why", "made")
    return {
        "name": record.name, "call": record.call, "output": record_line(record),
        "bad": stats is not None and stats.finite != stats.count,
        **{key: tags.get(key, "")[:4000] for key in keys},
    }  # fmt: skip


def why(request: PageRequest) -> Any:
    """Return a verdict by its key: its paragraph, and its explanation.

    The key may end after the step or the rank.
    """
    key = request.text("verdict")
    step, rank, kind, name = (key.split(" ", 3) + [""] * 4)[:4]
    if not all(word.isdecimal() for word in (step, rank or "0")):
        raise TensortapError(f"verdict must be a step, rank, kind and name, got {key!r:.80}")
    verdict = verdict_of(
        request.entry.table().alerts(), int(step), int(rank) if rank else None,
        (kind, name) if name else None,
    )  # fmt: skip
    if verdict is None:
        raise NotFound(NO_VERDICT)
    return msgspec.to_builtins(verdict)


ROUTES = (PageRoute("operations", operations), PageRoute("why", why))
