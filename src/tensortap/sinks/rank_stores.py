"""The sink of a run whose process may simulate several ranks: one store for each of them."""

from __future__ import annotations

from tensortap.pipeline.ledger import Entry
from tensortap.pipeline.sink import Sink, Wake
from tensortap.record import Kind
from tensortap.sinks.store import StoreSink

_PAUSE = 0.25  # seconds after which the stores of other ranks look for work


class RankStores(Sink):
    """Hands each record to the store of its rank; stores of other ranks are made when needed."""

    takes_columns = True

    def __init__(self, own: StoreSink) -> None:
        self.ledger = own.ledger
        self._own = own
        self._stores = {own.rank: own}

    @property
    def failing(self) -> str:
        return next((store.failing for store in self._all() if store.failing), "")

    @property
    def pending(self) -> int:
        return sum([store.pending for store in self._all()])

    def room(self) -> int:
        return min(store.room() for store in self._all())

    def send(self, entries: list[Entry]) -> None:
        by_rank: dict[int, list[Entry]] = {}
        for entry in entries:
            by_rank.setdefault(entry[0].rank, []).append(entry)
        for rank, group in by_rank.items():
            self._store(rank).send(group)

    def wait(self, wake: Wake, timeout: float) -> None:
        own, *others = self._all()
        own.wait(wake, min(timeout, _PAUSE) if others else timeout)
        for store in others:
            store.wait(wake, 0.0)

    def hurry(self) -> None:
        for store in self._all():
            store.hurry()

    def note_dropped(self, name: str, kind: Kind, step: int, rank: int) -> None:
        self._store(rank).note_dropped(name, kind, step, rank)

    def give_up(self) -> list[Entry]:
        return [entry for store in self._all() for entry in store.give_up()]

    def close(self) -> None:
        for store in self._all():
            store.close()

    def _store(self, rank: int) -> StoreSink:
        store = self._stores.get(rank)
        if store is None:
            own = self._own
            store = StoreSink(own.run, rank, durable=own.durable, ledger=self.ledger)
            self._stores[rank] = store
        return store

    def _all(self) -> list[StoreSink]:
        return list(self._stores.values())
