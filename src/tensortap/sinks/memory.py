"""A sink that keeps records in this process."""

from __future__ import annotations

from tensortap.history import History
from tensortap.pipeline.ticket import Ticket, settle
from tensortap.record import Kind, Record


class Memory:
    """Records in this process, at once and without a thread."""

    accepting = True

    def __init__(self, history: History) -> None:
        self.history = history

    def admit(self, nbytes: int, name: str = "", kind: Kind = Kind.VALUE) -> bool:
        return nbytes <= self.history.bound

    def missed(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """Larger than all memory there is: not kept."""

    def write(self, record: Record, ticket: Ticket, nbytes: int) -> None:
        self.history.write([record])
        settle([(record, ticket, nbytes)], True)

    def hurry(self) -> None:
        """Nothing is ever on its way."""

    def flush(self, timeout: float | None = None) -> bool:
        return True

    def close(self, timeout: float = 2.0) -> None:
        """Nothing to end."""
