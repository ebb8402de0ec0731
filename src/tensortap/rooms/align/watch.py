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
"""The key in the dict that a record of a digest holds."""

_INTERVAL = 0.5  # seconds
_NAMED = 5  # weights in a message
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
        self._names: dict[str, bool] = {}  # whether digests are recorded under a name
        self._seen: set[tuple[int, int]] = set()  # times and numbers of records
        self._known: dict[str, dict[str, list[Digest]]] = {}  # by name and program, newest first
        self._wrong: set[tuple[str, str, str]] = set()  # name and both programs

    def poll(self) -> list[Alert]:
        """Compare what has arrived, and write an alert into the history for each new finding."""
        history = self._server.history
        if history.written == self._written:
            return []
        self._written = history.written
        for name in history.names():
            if name not in self._names:  # the first record tells
                first = history.records(name, last=1)
                self._names[name] = any(digest_text(record) is not None for record in first)
        names = [name for name, is_digest in self._names.items() if is_digest]
        if not names:
            return []
        # late: most sessions have no digests, and these import NumPy
        from tensortap.alerts import record_of
        from tensortap.rooms.align.digest import digest_in

        alerts = []
        before, self._seen = self._seen, set()
        for name in names:
            for record in history.records(name, kind=Kind.VALUE, last=_LOOKED_AT):
                key = record.time_ns, record.seq
                self._seen.add(key)
                if key not in before:
                    try:
                        found = digest_in(record)
                    except TensortapError as error:  # records may come from anyone
                        log.warning("tensortap: %s", error)
                        continue
                    alerts += self._compare(name, found) if found is not None else []
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
