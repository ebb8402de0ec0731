"""Requests of the page: the probes of a live session, and a switch."""

from __future__ import annotations

from typing import Any

import msgspec

from tensortap.core.errors import TensortapError
from tensortap.live import answers
from tensortap.page.catalog import SessionEntry
from tensortap.page.responses import PageRequest, PageRoute
from tensortap.rooms.steer.steer import probe, probes


class _Shown:
    """The live session that a page shows."""

    def __init__(self, entry: Any) -> None:
        if not isinstance(entry, SessionEntry):
            raise TensortapError("only programs of a live session have probes")
        self._server = entry.server
        self.reader: Any = entry.reader()

    def ask(self, what: str, **arguments: Any) -> bytes:
        if self._server is not None:
            return answers.answer(self._server, what, arguments)
        answer: bytes = self.reader.query(what, **arguments)
        return answer


def probes_of(request: PageRequest) -> dict[str, Any]:
    """Return the programs of a live session with their probes."""
    found = probes(_Shown(request.entry), request.text("q"))
    return {"programs": msgspec.to_builtins(list(found))}


def switch(request: PageRequest) -> dict[str, Any]:
    """Change what is looked at, and say what came of it on each rank."""
    every = request.integer("every")
    kind = request.text("kind")
    action, argument = request.text("action"), request.text("argument")
    if action in ("trace", "rules"):
        more: dict[str, Any] = {action: argument}
    else:
        more = {action: True} if action in ("ops", "reset", "stop") else {}
    change = probe(
        _Shown(request.entry), request.text("q"), every=1 if every is None else every,
        tensors=bool(request.text("tensors")), steps=request.integer("steps") or 0,
        kind=kind or None, timeout=5.0, **more,
    )  # fmt: skip
    return dict(msgspec.to_builtins(change))


ROUTES = [
    PageRoute("probes", probes_of, cached=False),
    PageRoute("probe", switch, cached=False, method="POST"),
]
