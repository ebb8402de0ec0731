"""Compare the digests that programs send to a live session, version by version."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from tensortap.core.record import Kind
from tensortap.live.server import Server

if TYPE_CHECKING:
    from tensortap.alerts import Alert
    from tensortap.rooms.align.digest import Digest

log = logging.getLogger("tensortap")

_INTERVAL = 0.5  # seconds
_NAMED = 5  # weights in a message


def watch_digests(server: Server) -> None:
    """Compare digests of a live session until it is closed."""
    threading.Thread(target=DigestWatch(server).run, name="tensortap-digests", daemon=True).start()


class DigestWatch:
    """Raises an alert about the first version that did not arrive.

    Programs that record digests under one name are compared: that which recorded a version first is
    the one from which it comes.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._cursor = 0
        self._known: dict[str, dict[str, list[Digest]]] = {}  # by name and program, newest first
        self._wrong: set[tuple[str, str, str]] = set()  # name and both programs

    def poll(self) -> list[Alert]:
        """Compare what has arrived, and write an alert into the history for each new finding."""
        history = self._server.history
        if history.written == self._cursor:
            return []
        self._cursor, records = history.since(self._cursor)
        values = [record for record in records if record.kind is Kind.VALUE and record.value]
        if not values:
            return []
        # late: most sessions have no digests, and these import NumPy
        from tensortap.alerts import record_of
        from tensortap.rooms.align.digest import digest_in

        alerts = []
        for record in values:
            if (found := digest_in(record)) is not None:
                alerts += self._compare(record.name, found)
        now = time.time_ns()
        history.write([record_of(alert, seq=0, time_ns=now) for alert in alerts])
        for alert in alerts:
            log.warning("tensortap: %s", alert)
        return alerts

    def _compare(self, name: str, digest: Digest) -> list[Alert]:
        """Compare a digest with that of the same version in other programs; keep it."""
        from tensortap.alerts import Alert
        from tensortap.rooms.align.digest import HISTORY

        programs = self._known.setdefault(name, {})
        alerts = []
        for other, versions in programs.items():
            at = next(
                (i for i, each in enumerate(versions) if each.version == digest.version), None
            )
            if other == digest.source or at is None:
                continue
            sent, pair = versions[at], (name, other, digest.source)
            message = _difference(sent, digest, versions[at + 1 :])
            if message and pair not in self._wrong:
                text = f"version {digest.version} has not arrived in {digest.source}: {message}"
                step = digest.version or 0
                alerts.append(Alert("weights", name, Kind.VALUE, step, 0, "", text))
            (self._wrong.add if message else self._wrong.discard)(pair)
        own = programs.setdefault(digest.source, [])
        own.insert(0, digest)
        del own[HISTORY:]
        return alerts

    def run(self) -> None:
        """Compare until the server is closed."""
        while self._server.alive:
            time.sleep(_INTERVAL)
            try:
                self.poll()
            except Exception:
                log.exception("tensortap: digests are no longer compared")
                return


def _difference(sent: Digest, held: Digest, past: list[Digest]) -> str:
    """Return what differs between two digests in words; empty if nothing does."""
    from msgspec.structs import replace

    from tensortap.rooms.align.weights import compare_digests

    report = compare_digests(replace(sent, history=tuple(past)), held)
    if report:
        return ""
    shown = [str(each) for each in report.wrong[:_NAMED]]
    more = len(report.wrong) - len(shown)
    shown += [f"{more:,} more"] * (more > 0)
    return f"{report.line} with {sent.source}: {'; '.join(shown)}"
