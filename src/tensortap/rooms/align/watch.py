"""Compare the digests that programs send to a live session, version by version."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind, Mapping, Record
from tensortap.live.server import Server

if TYPE_CHECKING:
    from tensortap.alerts import Alert
    from tensortap.rooms.align.digest import Digest

log = logging.getLogger("tensortap")

KEY = "tensortap.digest"
"""Key of the dict in a digest's record."""

_INTERVAL = 0.5  # seconds
_LOOKED_AT = 64  # newest records of a name


def digest_text(record: Record) -> str | None:
    """Return the digest that a record holds, as JSON; None for any other record."""
    value = record.value
    if not isinstance(value, Mapping) or not value.items or value.items[0][0] != KEY:
        return None
    text = value.items[0][1]
    return text if isinstance(text, str) else None


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
        self._written = 0
        self._newest: dict[str, int | None] = {}  # by name: time of a digest; None: holds others
        self._compared: set[tuple[str, int | None, str]] = set()  # name, version and program
        self._wrong: set[tuple[str, str, str]] = set()  # name and both programs

    def poll(self) -> list[Alert]:
        """Compare what has arrived, and write an alert into the history for each new finding."""
        history = self._server.history
        if history.written == self._written:
            return []
        self._written = history.written
        alerts = []
        for name in history.names():
            newest = history.records(name, last=1) if self._newest.get(name, 0) is not None else []
            for record in newest:
                if digest_text(record) is None:
                    self._newest.setdefault(name, None)
                elif self._newest.get(name) != record.time_ns:
                    self._newest[name] = record.time_ns
                    alerts += self._compare(name)
        if alerts:
            from tensortap.alerts import record_of

            now = time.time_ns()
            history.write([record_of(alert, seq=0, time_ns=now) for alert in alerts])
        for alert in alerts:
            log.warning("tensortap: %s", alert)
        return alerts

    def _compare(self, name: str) -> list[Alert]:
        """Compare each version with that of the program that recorded it first."""
        # late: most sessions have no digests, and these import NumPy
        from tensortap.alerts import Alert
        from tensortap.rooms.align.digest import recorded_digests
        from tensortap.rooms.align.weights import compare_digests

        try:
            found = recorded_digests(self._server.history, name, last=_LOOKED_AT)
        except TensortapError as error:  # records may come from anyone
            log.warning("tensortap: %s", error)
            return []
        alerts: list[Alert] = []
        first: dict[int | None, Digest] = {}
        for held in found:
            sent = first.setdefault(held.version, held)
            key, pair = (name, held.version, held.source), (name, sent.source, held.source)
            if sent.source == held.source or key in self._compared:
                continue
            self._compared.add(key)
            report = compare_digests(sent, held)
            if report:
                self._wrong.discard(pair)
            elif pair not in self._wrong:
                self._wrong.add(pair)
                text = f"version {held.version} has not arrived in {held.source}: {report.line} "
                text += f"with {report.a}, such as {report.wrong[0]}"
                alerts.append(Alert("weights", name, Kind.VALUE, held.version or 0, 0, "", text))
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
