"""Compare the ranks of a live session while their records arrive."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from tensortap.server.server import Server

if TYPE_CHECKING:
    from tensortap.alerts import Alert
    from tensortap.alerts.rank_rules import RankLimits
    from tensortap.record import Record

log = logging.getLogger("tensortap")

_INTERVAL = 1.0  # seconds
_SHARE = 0.05  # of the time of a processor
_BATCH = 1 << 15  # records


class RankWatch:
    """Raises alerts in a live session about ranks that disagree, are behind or silent.

    A thread of its own reads what arrives, once there are records of a second rank.
    """

    def __init__(self, server: Server, limits: RankLimits | None = None) -> None:
        self._server = server
        self._limits = limits
        self._comparison: RankComparison | None = None
        self._cursor = 0

    def start(self) -> None:
        """Compare until the server is closed."""
        threading.Thread(target=self._run, name="tensortap-ranks", daemon=True).start()

    def poll(self) -> list[Alert]:
        """Compare what has arrived, and write an alert into the history for each problem."""
        if not any(client.info.rank for client in list(self._server.clients.values())):
            return []
        if self._comparison is None:
            self._comparison = RankComparison(self._limits)
        alerts: list[Alert] = []
        history, is_left = self._server.history, True
        while is_left and self._server.alive:
            self._cursor, records = history.since(self._cursor, _BATCH)
            is_left = self._cursor < history.written
            alerts += self._comparison.see(records, None if is_left else time.time_ns())
        history.write(self._comparison.records(alerts))
        for alert in alerts:
            log.warning("tensortap: %s", alert)
        return alerts

    def _run(self) -> None:
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


class RankComparison:
    """Compares the statistics, the progress and the replicas of ranks."""

    def __init__(self, limits: RankLimits | None) -> None:
        # late: most sessions have one rank, and these import NumPy and Arrow
        from tensortap.alerts.ballots import BallotBox
        from tensortap.table.rank_alerts import LiveRanks

        self._ranks = LiveRanks(limits)
        self._ballots = BallotBox()

    def see(self, records: list[Record], now_ns: int | None) -> list[Alert]:
        """Take records; `now_ns` is the time if no more have arrived."""
        alerts = [alert for record in records for alert in self._ballots.add(record)]
        return [*alerts, *self._ranks.see(records, now_ns)]

    def records(self, alerts: list[Alert]) -> list[Record]:
        """Return alerts as records of the ranks that they are about."""
        from tensortap.alerts import record_of

        now = time.time_ns()
        return [record_of(alert, seq=0, time_ns=now) for alert in alerts]
