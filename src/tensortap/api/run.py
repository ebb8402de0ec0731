"""A run, as people use it: ``run = tap.open("runs/20261115_181530")``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap import frameworks as arrays
from tensortap.api import tables, verbs
from tensortap.errors import NotFound, TensortapError
from tensortap.frameworks.snapshot import borrow
from tensortap.pipeline.receipt import Receipt
from tensortap.readers.reader import find, find_all, kept_value
from tensortap.readers.run import RunReader
from tensortap.record import Kind, Opaque, Record, Summary, TensorData
from tensortap.runs.object_files import load_file
from tensortap.runs.rows import number_of
from tensortap.server.questions import NameRow
from tensortap.table.logframe_schema import need_pandas
from tensortap.text.records import record_line

if TYPE_CHECKING:
    import pandas as pd

    from tensortap.alerts import Alert
    from tensortap.table.table import Table


class Run:
    """A run on disk: finished, crashed, or still being written (`refresh`, `follow`)."""

    def __init__(self, path: str | Path) -> None:
        self.reader = RunReader(path)
        self.path = self.reader.path

    def __repr__(self) -> str:
        return f"<run {self.path}: {sum(self.reader.counts().values()):,} records>"

    def refresh(self) -> Run:
        """Take in what has been written since the last look."""
        self.reader.refresh()
        return self

    def names(self) -> list[str]:
        """All names, in the order in which they first came."""
        return self.reader.names()

    def records(self, name: str | None = None) -> Iterator[Record]:
        """The records of a name, or all, with their values, one at a time."""
        for _, records in self.reader.by_name([name] if name is not None else self.names()):
            for record in records:
                yield self.reader.load(record)

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
        """A value: the latest, or `index` before it, or that of a `step`.

        ``rank="all"`` gives a dict of the values of all ranks. `trust` allows dumped objects
        whose reading may run code.
        """
        if rank == "all":
            ranks = sorted({r.rank for r in find_all(self.reader, name, step=step, kind=kind)})
            return {
                r: self.get(name, index, step=step, rank=r, kind=kind, trust=trust) for r in ranks
            }
        chosen = verbs.rank_number(rank)
        record = find(self.reader, name, index, step=step, rank=chosen, kind=kind)
        return self._value(record, trust)

    def get_all(
        self,
        name: str,
        *,
        rank: int | None = None,
        kind: Kind | str | None = None,
        trust: bool = False,
    ) -> list[Any]:
        """All values of a name, oldest to newest."""
        found = find_all(self.reader, name, rank=rank, kind=kind)
        return [self._value(record, trust) for record in found]

    def _value(self, head: Record, trust: bool) -> Any:
        record = self.reader.load(head)
        file = record.tags.get("file")
        if file is not None:
            return load_file(self.reader.file(file), trust=trust)
        return arrays.rebuild(kept_value(record))

    def describe(
        self,
        name: str,
        index: int = 0,
        *,
        step: int | None = None,
        rank: int | None = None,
        kind: Kind | str | None = None,
    ) -> None:
        """Print what is held under a name, and the latest in a line a tensor."""
        verbs.describe(
            self.reader, name, index, step=step, rank=rank, kind=kind, load=self._with_file
        )

    def _with_file(self, head: Record) -> Record:
        """A record with its value, which may be in a file that was dumped."""
        record = self.reader.load(head)
        file = record.tags.get("file")
        if file is None:
            return record
        try:
            value = borrow(load_file(self.reader.file(file), mapped=True))
        except TensortapError as error:
            value = Opaque(file, str(error))
        return msgspec.structs.replace(record, value=value)

    def missing(self) -> list[tuple[str, int, int]]:
        """(name, step, rank) of the values that found no room when they were captured."""
        return self.reader.missing()

    def receipt(self, rank: int = 0) -> Receipt:
        """What it has cost the training thread of a rank; known when the run has ended."""
        found = self.reader.receipts()
        if rank not in found:
            held = f"there is that of {sorted(found)}" if found else "it is written at the end"
            raise NotFound(f"no receipt of rank {rank} in {self.path}: {held}")
        return found[rank]

    def summary(self) -> None:
        """Print what ran, every name with its latest record, and what is missing."""
        from rich.console import Console

        Console().print(tables.run_summary(self))

    def rows(self) -> list[NameRow]:
        """Every name with its latest record in a line."""
        rows = []
        for head, held in self.reader.latest():
            file = self.reader.load(head)
            line = file.tags.get("file") or record_line(file)
            rows.append(NameRow(head, held, 0, line))
        return rows

    def export(self, target: str | Path, *, names: str | None = None) -> int:
        """Write it to ``.npz``, ``.h5``, ``.parquet`` or a folder; how many records it was."""
        from tensortap.api.export import export

        return export(self, target, names=names)

    def film(self, name: str, target: str | Path, **options: Any) -> int:
        """Make a film of a name: ``.mp4``, ``.gif``, or a folder of frames; how many there are.

        `options` are ``mode``, ``size``, ``fps``, ``rank``, ``kind``, ``steps`` and the looks of a
        `tap.Recorder`.
        """
        from tensortap.films.film import film

        return film(self.reader, name, target, **options)

    def to_tensorboard(self, folder: str | Path, **options: Any) -> int:
        """Write its statistics for TensorBoard; see `tap.integrations.tensorboard.export`."""
        from tensortap.integrations.tensorboard import export

        return export(self, folder, **options)

    def to_wandb(self, folder: str | Path = ".", **options: Any) -> Path:
        """Write its statistics for wandb; see `tap.integrations.wandb.export`."""
        from tensortap.integrations.wandb import export

        return export(self, folder, **options)

    def follow(self, timeout: float | None = None, interval: float = 0.1) -> Iterator[Record]:
        """Records as they land, from the first on; ends with the run, or after `timeout` idle."""
        idle_since = time.monotonic()
        while True:
            ended = self.reader.info.ended is not None
            for record in self.reader.new_records():
                idle_since = time.monotonic()
                yield self.reader.load(record)
            if ended:
                return
            if timeout is not None and time.monotonic() - idle_since > timeout:
                return
            time.sleep(interval)
            self.reader.refresh()

    def stats(self, compute: bool = True) -> pd.DataFrame:
        """A flat frame: name, kind, step, rank and every statistic, a row a record.

        Where a record has no statistics, they are worked out from its tensor, if `compute`.
        """
        need_pandas("run.stats()")
        from tensortap.table import frames

        return frames.stats_of(self.table(compute=compute))

    def summarized(self, heads: Iterable[tuple[str, int, int]]) -> Iterator[Record]:
        """Records by name, rank and seq, with the statistics of their tensors, without those."""
        wanted = list(heads)
        names = dict.fromkeys(name for name, _, _ in wanted)
        found = {(r.rank, r.seq): r for _, held in self.reader.by_name(names) for r in held}
        for _, rank, seq in wanted:
            head = found[rank, seq]
            value = self.reader.load(head).value
            number = number_of(value)
            yield msgspec.structs.replace(head, stats=_summary(value), value=number)

    def logframe(
        self, exponents: tuple[int, int] | None = None, *, compute: bool = True
    ) -> pd.DataFrame:
        """The frame that figures of numerics are drawn from; see `tap.validate_logframe`.

        `exponents` are the first and the last bin that get a column of their own, None is all
        that occur. Tensors without statistics get them, if `compute`.
        """
        need_pandas("run.logframe()")
        from tensortap.table import frames

        return frames.logframe_of(self.table(compute=compute), exponents=exponents)

    def formats(
        self,
        dtype: str,
        *,
        name: str | None = None,
        kind: Kind | str | None = None,
        step: int | str | None = None,
        compute: bool = True,
    ) -> pd.DataFrame:
        """What each tensor would lose in a format (``"float8_e4m3fn"``), and the best scale.

        Of the latest step of each tensor, of one `step`, or of ``"all"``; all ranks and calls
        of a step together. `name` is a regular expression.
        """
        need_pandas("run.formats()")
        from tensortap.table import frames

        table = self.table(compute=compute)
        return frames.formats_of(table, dtype, name=name, kind=kind, step=step)

    def metrics(self, *names: str) -> pd.DataFrame:
        """Training statistics: a row a step and rank, a column a metric.

        Without names these are the metrics of ``tracker.step(loss=…)``; with names any records
        that are single numbers, such as a loss that was caught.
        """
        need_pandas("run.metrics()")
        from tensortap.table import frames

        return frames.metrics_of(self.reader, names)

    def alerts(self) -> list[Alert]:
        """The alerts of the run, in the order in which they came."""
        from tensortap.alerts import alert_of

        heads = [
            head
            for name in self.reader.names(Kind.ALERT)
            for head in self.reader.records(name, kind=Kind.ALERT)
        ]
        heads.sort(key=lambda r: (r.step, r.seq, r.rank))
        return [alert_of(self.reader.load(head)) for head in heads]

    def table(self, *, compute: bool = False) -> Table:
        """The columns of the run; tensors without statistics get them, if `compute`."""
        from tensortap.table.frames import tensors_without_statistics
        from tensortap.table.table import table_of

        table = table_of(self.reader)
        if compute:
            table.append(self.summarized(tensors_without_statistics(table)))
        return table


def _summary(value: Any) -> Summary | None:
    from tensortap.frameworks.view import as_numpy
    from tensortap.stats import summarize_array

    if not isinstance(value, TensorData):
        return None
    try:
        return summarize_array(as_numpy(value))
    except TypeError:  # dates and strings have none
        return None
