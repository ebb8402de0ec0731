"""Values, descriptions and statistics: get, get_all, describe, summarize."""

from __future__ import annotations

from typing import Any

from tensortap import values as frameworks
from tensortap.core.arguments import checked
from tensortap.core.errors import NotFound
from tensortap.core.files import plain
from tensortap.core.record import Kind, Record, Summary, TensorData
from tensortap.runs.assemble import Disagreement, assemble
from tensortap.runs.reader import Reader, find, find_all, find_parts, kept_value
from tensortap.stats import summarize_array
from tensortap.text.records import record_details
from tensortap.text.tensors import styled
from tensortap.values.snapshot import summary_of
from tensortap.values.view import as_numpy


class Values:
    """The values of a reader; sessions and runs add to it."""

    reader: Reader

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def names(self) -> list[str]:
        """Return all names, in the order of their first record."""
        return self.reader.names()

    @checked
    def get(
        self,
        name: str,
        index: int = 0,
        *,
        step: int | None = None,
        rank: int | str | None = None,
        kind: Kind | str | None = None,
        trust: bool = False,
    ) -> Any:
        """Return a copy of a value: the latest, the `index`-th before it, or that of a `step`.

        ``rank="all"`` gives a dict of the values of all ranks, ``rank="whole"`` one tensor,
        assembled from their shards. `trust` allows dumped objects that may run code when they are
        loaded.
        """
        if rank == "all":
            ranks = sorted({r.rank for r in find_all(self.reader, name, step=step, kind=kind)})
            wanted: dict[str, Any] = {"step": step, "kind": kind, "trust": trust}
            return {each: self.get(name, index, rank=each, **wanted) for each in ranks}
        if rank == "whole":
            found = find_parts(self.reader, name, index, step=step, kind=kind)
            return self._whole([self.reader.load(head) for head in found])
        if isinstance(rank, str):
            raise NotFound(f"rank must be a number, 'all' or 'whole', got {rank!r}")
        return self._value(find(self.reader, name, index, step=step, rank=rank, kind=kind), trust)

    @checked
    def get_all(
        self,
        name: str,
        *,
        rank: int | None = None,
        kind: Kind | str | None = None,
        trust: bool = False,
    ) -> list[Any]:
        """Return all values of a name, oldest to newest."""
        found = find_all(self.reader, name, rank=rank, kind=kind)
        return [self._value(record, trust) for record in found]

    @checked
    def describe(
        self,
        name: str,
        index: int = 0,
        *,
        step: int | None = None,
        rank: int | None = None,
        kind: Kind | str | None = None,
    ) -> None:
        """Print a record with one line per leaf of its value."""
        from rich.console import Console
        from rich.text import Text

        record = self._load(find(self.reader, name, index, step=step, rank=rank, kind=kind))
        head, *lines = record_details(record).split("\n")
        console = Console()
        console.print(Text(plain(head), style="bold"))
        for line in lines:
            console.print(styled(plain(line)))
        records = find_all(self.reader, name, rank=record.rank, kind=record.kind)
        summary = f"  {len(records)} {'record' if len(records) == 1 else 'records'}"
        if len(records) > 1:
            summary += f", steps {records[0].step} to {records[-1].step}"
        if evicted := getattr(self.reader, "evicted", {}).get(name):  # only a history evicts
            summary += f"; {evicted} evicted"
        console.print(summary, style="dim", highlight=False)

    def _whole(self, records: list[Record]) -> Any:
        values = [kept_value(record) for record in records]
        first = values[0]
        if not isinstance(first, TensorData) or (len(records) == 1 and records[0].shard is None):
            return frameworks.rebuild(first)
        arrays = [as_numpy(each) for each in values if isinstance(each, TensorData)]
        try:
            whole = assemble(zip(records, arrays, strict=False))
        except Disagreement as error:
            title = f"{records[0].name!r} at step {records[0].step}"
            raise NotFound(
                f"{title} cannot be put together: {error}; rank='all' gives its parts"
            ) from None
        data = TensorData(first.framework, first.dtype, whole.shape, whole.tobytes())
        return frameworks.rebuild(data)

    def _load(self, head: Record) -> Record:
        return self.reader.load(head)

    def _value(self, head: Record, trust: bool) -> Any:
        return frameworks.rebuild(kept_value(self.reader.load(head)))


def get(reader: Reader, name: str, index: int = 0, **wanted: Any) -> Any:
    """Return a value of a reader, as `Values.get` does."""
    return Values(reader).get(name, index, **wanted)


def summarize(value: Any) -> Summary:
    """Return the statistics of an array, a tensor or a number.

    >>> summarize([1.0, -2.0]).max_abs
    2.0
    """
    if isinstance(value, (bool, int, float, complex, list, tuple)):
        import numpy

        return summarize_array(numpy.asarray(value))
    return summary_of(value)
