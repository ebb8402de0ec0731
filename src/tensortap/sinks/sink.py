"""The seam between the session and whatever keeps or sends records."""

from __future__ import annotations

from typing import Protocol

from tensortap.pipeline.ticket import Ticket
from tensortap.record import Kind, Record


class Sink(Protocol):
    """Takes records; called by the training thread, so nothing here may take long."""

    @property
    def accepting(self) -> bool:
        """Whether records are wanted at all."""
        ...

    def admit(self, nbytes: int, name: str = "", kind: Kind = Kind.VALUE) -> bool:
        """Ask for room before a value is copied."""
        ...

    def missed(self, name: str, kind: Kind, step: int, rank: int) -> None:
        """A value that was not admitted: what it was."""
        ...

    def write(self, record: Record, ticket: Ticket, nbytes: int) -> None:
        """Take a record for which there is room."""
        ...

    def hurry(self) -> None:
        """Somebody waits for what was written: do not gather more first."""
        ...

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything written has met its fate; False when time ran out."""
        ...

    def close(self, timeout: float = 2.0) -> None:
        """Flush for at most `timeout` seconds and end."""
        ...
