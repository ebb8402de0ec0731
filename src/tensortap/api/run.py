"""A run, as people use it: ``run = tap.open("runs/20261115_181530")``."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tensortap import values as frameworks
from tensortap.api.lookup import Values
from tensortap.capture.ledger import Receipt
from tensortap.core.arguments import checked
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.record import Opaque, Record
from tensortap.core.rooms import offer
from tensortap.live.answers import NameRow
from tensortap.runs.layout import RUN_FILE, run_state
from tensortap.runs.reader import kept_value
from tensortap.runs.rows import HEAD_COLUMNS, records_of
from tensortap.runs.run_reader import RunReader
from tensortap.table.kinds import need_pandas
from tensortap.text.records import record_line
from tensortap.values.snapshot import borrow

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import pandas as pd
    import pyarrow.dataset as ds

    from tensortap.alerts import Alert, Rule
    from tensortap.table.table import Table


class Run(Values):
    """A run on disk: finished, crashed, or still being written (`refresh`, `follow`)."""

    def __init__(self, path: str | Path) -> None:
        self.reader: RunReader = RunReader(path)
        self.path = self.reader.path

    def __repr__(self) -> str:
        return f"<run {self.path}: {sum(self.reader.counts().values()):,} records>"

    def _repr_html_(self) -> str:
        info = self.reader.info
        facts = {
            "run": str(self.path), "name": info.name, "notes": info.notes, "started": info.started,
            "ended": f"{info.ended or 'not yet'} {info.crashed}", "config": info.config or "",
            "records": f"{sum(self.reader.counts().values()):,}", "alerts": len(self.alerts()),
        }  # fmt: skip
        return html_table([row for row in facts.items() if row[1] != ""])

    def refresh(self) -> Run:
        """Read what has been written since the last refresh."""
        self.reader.refresh()
        return self

    @checked
    def records(self, name: str | None = None) -> Iterator[Record]:
        """Yield the records of a name, or all records, with their values."""
        for _, records in self.reader.by_name([name] if name is not None else self.names()):
            for record in records:
                yield self.reader.load(record)

    def _value(self, head: Record, trust: bool) -> Any:
        record = self.reader.load(head)
        file = record.tags.get("file")
        if file is not None:
            return self.reader.load_file(file, trust=trust)
        return frameworks.rebuild(kept_value(record))

    def _load(self, head: Record) -> Record:
        """Return a record with its value, which may be in a dumped file."""
        record = self.reader.load(head)
        file = record.tags.get("file")
        if file is None:
            return record
        try:
            value = borrow(self.reader.load_file(file))
        except TensortapError as error:
            value = Opaque(file, str(error))
        return msgspec.structs.replace(record, value=value)

    def missing(self) -> list[tuple[str, int, int]]:
        """Return (name, step, rank) of the values that were dropped over budget."""
        return self.reader.missing()

    @checked
    def receipt(self, rank: int = 0) -> Receipt:
        """Return what capturing has cost the training thread of a rank; written at the end."""
        receipts = self.reader.receipts()
        if rank not in receipts:
            ranks = ", ".join(map(str, sorted(receipts)))
            why = f"there are receipts of ranks {ranks}" if ranks else "it is written at the end"
            raise NotFound(f"no receipt of rank {rank} in {self.path}: {why}")
        return receipts[rank]

    def summary(self) -> None:
        """Print when the run was written, every name with its latest record, and what it lacks."""
        from rich.console import Console

        from tensortap.api import tables

        Console().print(tables.run_summary(self))

    @checked
    def rows(self, limit: int | None = None) -> list[NameRow]:
        """Return every name, or the first ones, with its latest record as one line."""
        table = self.table()
        with table.lock:
            newest, counts = _newest(table, limit)
            heads = records_of(table.take(newest, HEAD_COLUMNS))
        rows = []
        for head, count in zip(heads, counts.tolist(), strict=True):
            record = self.reader.load(head)
            rows.append(NameRow(head, count, 0, record.tags.get("file") or record_line(record)))
        return rows

    @checked
    def compact(self, executor: Executor | None = None) -> int:
        """Sort the run into windows, of which figures and comparisons read little.

        The files of the run stay. Call it again for what was written since. With an `executor`
        of `concurrent.futures` or Dask, windows are written in parallel. Return their number.
        """
        windows: int = offer("run.compact")(self.reader, executor)
        return windows

    def dataset(self) -> ds.Dataset:
        """Return the records as a `pyarrow.dataset.Dataset`, one row each, as they are now.

        Nothing is read yet: Arrow and DuckDB read the columns and rows that a query needs, piece
        by piece, so that a run may be larger than the memory.
        """
        return self.reader.dataset()

    @checked
    def film(self, name: str, target: str | Path, **options: Any) -> int:
        """Make a film of a name: ``.mp4`` or ``.gif``; return the number of frames.

        `options` are ``mode``, ``size``, ``fps``, ``rank``, ``kind``, ``steps`` and the style
        options of a `tap.Recorder`.
        """
        frames: int = offer("run.film")(self.reader, name, target, **options)
        return frames

    def to_tensorboard(self, folder: str | Path, **options: Any) -> int:
        """Write the statistics for TensorBoard; see `tap.rooms.integrations.tensorboard.export`."""
        records: int = offer("run.to_tensorboard")(self, folder, **options)
        return records

    def to_wandb(self, folder: str | Path = ".", **options: Any) -> Path:
        """Write the statistics for wandb; see `tap.rooms.integrations.wandb.export`."""
        path: Path = offer("run.to_wandb")(self, folder, **options)
        return path

    @checked
    def follow(self, timeout: float | None = None, interval: float = 0.1) -> Iterator[Record]:
        """Yield records as they are written; end with the run, or after `timeout` idle seconds."""
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

    @checked
    def stats(self, *, rank: int | str | None = None) -> pd.DataFrame:
        """Return a frame with name, kind, step, rank and all statistics, one row per record.

        The statistics of tensors that were recorded without any are computed. By default,
        what several ranks recorded of a tensor is merged into one row, that of the lowest rank;
        `rank` is one rank, or ``"all"`` for every record.
        """
        need_pandas("run.stats()")
        from tensortap.table import frames

        return frames.stats_of(self.table(compute=True), rank=rank)

    @checked
    def logframe(
        self,
        exponents: tuple[int, int] | None = None,
        *,
        strict: bool = False,
        rank: int | str | None = None,
    ) -> pd.DataFrame:
        """Return the frame for figures of numerics; see `tap.viz.validate_logframe`.

        `exponents` are the first and the last bin with a column; by default all that occur.
        The statistics of tensors that were recorded without any are computed. `strict` is for
        readers that allow no further metadata: rank and call are then below ``scalar_stats``.
        `rank` is as for `stats`.
        """
        need_pandas("run.logframe()")
        table = self.table(compute=True)
        return offer("run.logframe")(table, exponents=exponents, strict=strict, rank=rank)

    @checked
    def formats(self, dtype: str, *, step: int | str | None = None) -> pd.DataFrame:
        """Return what each tensor would lose in a format (``"float8_e4m3fn"``), and its best scale.

        By default for the latest step of each tensor; `step` is another one, or ``"all"``. All
        ranks and calls of a step count together.
        """
        need_pandas("run.formats()")
        table = self.table(compute=True)
        frame: pd.DataFrame = offer("run.formats")(table, dtype, step=step)
        return frame

    @checked
    def metrics(self, *names: str) -> pd.DataFrame:
        """Return training metrics: one row per step and rank, one column per metric.

        Without names these are the metrics of ``tracker.step(loss=…)``; with names any records
        that are single numbers, such as a caught loss.
        """
        need_pandas("run.metrics()")
        from tensortap.table import frames

        return frames.metrics_of(self.reader, names)

    @checked
    def alerts(self, rules: Iterable[Rule] | bool = False) -> list[Alert]:
        """Return the alerts that training raised, and those of `ranks`, in order.

        With `rules`, return those that they raise instead: rules of ``tap.track(alerts=…)`` for the
        statistics of whole tensors. True is all of them, and `ranks`.
        """
        from tensortap.api.run_alerts import rule_alerts, run_alerts

        table = self.table()
        if rules is False:
            return AlertList(run_alerts(table, self.reader))
        return AlertList(rule_alerts(table, rules))

    def ranks(self) -> list[Any]:
        """Return where ranks disagree, by step; an empty list if they do not.

        Replicas that differ, ranks whose statistics are far from those of the others, ranks that
        are behind: each finding has a rule, ranks, name, kind, module, steps and a message.
        """
        table = self.table()
        with table.lock:
            findings: list[Any] = offer("run.ranks")(table)
        return findings

    def hints(self) -> list[Alert]:
        """Return what rules found in training steps that may be a bug, but may be meant so."""
        return self.table().alerts("hint")

    def table(self, *, compute: bool = False) -> Table:
        """Return the columns of the run; `compute` adds statistics that were not recorded."""
        from tensortap.table.frames import complete_table
        from tensortap.table.table import table_of

        return complete_table(self.reader) if compute else table_of(self.reader)


def _newest(table: Table, names: int | None) -> tuple[Any, Any]:
    """Return the newest row of every name, kind and rank, by name, and how many each has."""
    rows = np.flatnonzero(table.name < (len(table.names) if names is None else names))[::-1]
    kinds, size = len(table.kinds), len(table.names)
    key = (table.rank[rows].astype(np.int64) * kinds + table.kind[rows]) * size + table.name[rows]
    _, first, counts = np.unique(key, return_index=True, return_counts=True)
    found = rows[first]
    order = np.lexsort((table.rank[found], table.values_at("seq", found), table.name[found]))
    return found[order], counts[order]


class AlertList(list["Alert"]):
    """Alerts that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        rows = [(a.step, a.rank, a.rule, a.name, a.kind.value, a.message) for a in self]
        return html_table(rows, ("step", "rank", "rule", "name", "kind", "message"))


def html_table(rows: Iterable[Sequence[object]], heads: Sequence[str] = ()) -> str:
    """Return a table of texts.

    >>> html_table([["<x>"]])
    '<table><tr><td style="text-align:left">&lt;x&gt;</td></tr></table>'
    """

    def line(tag: str, cells: Sequence[object]) -> str:
        shown = (html.escape(str(cell)[:1000]) for cell in cells)
        return "".join(f'<{tag} style="text-align:left">{cell}</{tag}>' for cell in shown)

    all_lines = [line("th", heads)] * bool(heads) + [line("td", row) for row in rows]
    return f"<table>{''.join(f'<tr>{each}</tr>' for each in all_lines)}</table>"


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return start, state, counts and size of each run in a folder, oldest first."""
    if not folder.is_dir():
        raise NotFound(f"no folder {folder}")
    return [_listed(path) for path in sorted(folder.iterdir()) if (path / RUN_FILE).is_file()]


def _listed(path: Path) -> dict[str, Any]:
    row = {
        "run": path.name,
        "name": "",
        "started": "",
        "state": "",
        "records": 0,
        "names": 0,
        "ranks": 0,
    }
    try:
        reader = RunReader(path)
        counts = reader.counts()
    except TensortapError as error:
        row["state"] = f"unreadable: {error}"
    else:
        written = max(file.stat().st_mtime for file in path.rglob("*"))
        row |= {
            "name": reader.info.name,
            "started": reader.info.started,
            "state": run_state(reader.info, written),
            "records": sum(counts.values()),
            "names": len(counts),
            "ranks": len(reader.ranks),
        }
    row["nbytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return row
