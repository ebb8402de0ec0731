"""Compare the ranks of a live session while their records arrive."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensortap.live.server import Server

if TYPE_CHECKING:
    from tensortap.alerts import Alert
    from tensortap.core.record import Record
    from tensortap.rooms.ranks.findings import RankFinding
    from tensortap.table.table import Table

log = logging.getLogger("tensortap")

_INTERVAL = 1.0  # seconds
_SHARE = 0.05  # of the time of a processor
_NEVER = -(1 << 62)  # before all steps
_PATIENCE = 30.0  # seconds for all ranks to have records: two of three have no majority
_MOST_RECORDS = 1 << 17  # that are compared; they take up to 200 MB


def watch_ranks(server: Server) -> None:
    """Compare the ranks of a live session until it is closed."""
    threading.Thread(target=RankWatch(server).run, name="tensortap-ranks", daemon=True).start()


class RankWatch:
    """Raises alerts in a live session about ranks that disagree with the others or are behind.

    A thread of its own runs `rank_findings` over the newest records, once there is a second rank.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._table: Table | None = None
        self._begun = 0.0  # when a second rank was seen
        self._is_complete = False  # whether all that has arrived was compared
        self._reported: dict[tuple[object, ...], int] = {}  # rule, ranks and name → last step

    def poll(self) -> list[Alert]:
        """Compare what has arrived, and write an alert into the history for each new finding."""
        if not any(client.info.rank for client in list(self._server.clients.values())):
            return []
        # late: most sessions have one rank, and these import NumPy and Arrow
        from tensortap.alerts import record_of
        from tensortap.rooms.ranks.findings import rank_findings, ranks_behind

        has_grown = self._table is None or self._table.refresh()
        if self._table is None or len(self._table) > _MOST_RECORDS:
            self._table = self._recent_records(_MOST_RECORDS // 2)
        now = time.time_ns()
        if has_grown and not self._all_have_begun(self._table):
            return []
        if has_grown or not self._is_complete:
            # if nothing more comes, what is missing of the newest steps does not come either
            self._is_complete = not has_grown
            found = rank_findings(self._table, settled=has_grown, now_ns=now)
        else:
            found = ranks_behind(self._table, now)
        alerts = [finding.alert for finding in found if self._is_new(finding)]
        self._server.history.write([record_of(alert, seq=0, time_ns=now) for alert in alerts])
        for alert in alerts:
            log.warning("tensortap: %s", alert)
        return alerts

    def _all_have_begun(self, table: Table) -> bool:
        """Return whether every rank of the job has records, or has had its time."""
        self._begun = self._begun or time.monotonic()
        expected = max(client.info.world_size for client in list(self._server.clients.values()))
        return len(table.ranks()) >= expected or time.monotonic() > self._begun + _PATIENCE

    def _recent_records(self, most: int) -> Table:
        """Return a table of at most so many of the newest records, to which later ones come."""
        from tensortap.rooms.ranks.suspects import COMPARED
        from tensortap.table.sources import RecordSource
        from tensortap.table.table import Table

        history = self._server.history
        cursor = max(0, history.written - most)

        def new_records(_: int) -> Iterator[Record]:
            nonlocal cursor
            end = history.written
            while cursor < end:
                cursor, found = history.since(cursor, 1 << 15)
                yield from (record for record in found if record.kind in COMPARED)

        return Table(lambda: RecordSource(new_records, bounded=True, values=False))

    def _is_new(self, finding: RankFinding) -> bool:
        """Return whether a finding is no continuation of one that was reported."""
        key = finding.rule, finding.ranks, finding.name if finding.rule == "replicas" else ""
        before = self._reported.get(key, _NEVER)
        self._reported[key] = max(before, finding.last_step)
        return finding.step > before

    def run(self) -> None:
        """Compare until the server is closed."""
        pause = _INTERVAL
        while self._server.alive:
            time.sleep(pause)
            start = time.thread_time()  # a busy machine is no reason to look less often
            try:
                self.poll()
            except Exception:
                log.exception("tensortap: ranks are no longer compared")
                return
            pause = max(_INTERVAL, (time.thread_time() - start) / _SHARE)
