"""The callback that moves traced values to an HDF5 file."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensortap.errors import TensortapError
from tensortap.hdf5.rows import Filters
from tensortap.hdf5.values import check_dtype
from tensortap.hdf5.writer import Options, Writer, h5py_or_say, path_of, there_already
from tensortap.ranks import rank_and_world_size

_EXISTS = ("refuse", "keep", "replace")
_PAUSE = 0.2  # seconds between two flushes, which cost as much as some rows


class HDF5:
    """A callback that moves traced values to an HDF5 file as they come.

    It takes the values out of the lists that it is given, and says in `datasets` where they are.
    `exists` is what is done where the file is there: ``refuse``, ``keep`` (append) or ``replace``.
    What was flushed survives the end of the process, whatever ends it: that is after `flush_every`
    calls, or, if none are said, after a call when the last flush is a fifth of a second old.

    >>> import tempfile, numpy
    >>> saver = HDF5(tempfile.mkdtemp() + "/trace.h5")
    >>> values, iterations, ranks = [numpy.ones(3), numpy.zeros(3)], [0, 1], [0, 0]
    >>> saver("forward.x", values, iterations, ranks)
    >>> saver.close()
    >>> saver.datasets["forward.x"].shape, values
    ((2, 3), [])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compression: str | int | None = None,
        compression_opts: Any = None,
        shuffle: bool = False,
        float_dtype: Any = None,
        int_dtype: Any = None,
        iteration_dtype: Any = "int64",
        ragged: bool = False,
        exists: str = "refuse",
        chunks: int | None = None,
        flush_every: int | None = None,
    ) -> None:
        h5py_or_say()
        if exists not in _EXISTS:
            raise TensortapError(f"exists={exists!r}: say 'refuse', 'keep' or 'replace'")
        if chunks is not None and chunks < 1:
            raise TensortapError(f"chunks={chunks}: say how many rows a chunk has, at least 1")
        if flush_every is not None and flush_every < 1:
            raise TensortapError(f"flush_every={flush_every}: say after how many calls, at least 1")
        filters = Filters(compression, compression_opts, shuffle, chunks)
        filters.check()
        self._given = Path(path)
        self._exists = exists
        self._options = Options(
            filters,
            None if float_dtype is None else check_dtype(float_dtype, "float_dtype"),
            None if int_dtype is None else check_dtype(int_dtype, "int_dtype"),
            check_dtype(iteration_dtype, "iteration_dtype"),
            ragged,
        )
        self._flush_every = flush_every
        self._calls = 0
        self._flushed_at = -math.inf  # the first call is: a file that is there tells most
        self._lock = threading.RLock()
        self._opened: Path | None = None
        self._writer: Writer | None = None
        self._reading: Any = None
        self._closer: Any = None
        if exists == "refuse" and self.path.exists():
            raise there_already(self.path)  # before the training, not after its first hour

    def __repr__(self) -> str:
        return f"HDF5({str(self._given)!r})"

    @property
    def path(self) -> Path:
        """The file; a rank other than 0 that keeps values of its own has a file of its own."""
        if self._opened is not None:
            return self._opened
        rank, _ = rank_and_world_size()
        given = self._given
        return given.with_name(f"{given.stem}_rank{rank}{given.suffix}") if rank else given

    @property
    def datasets(self) -> Mapping[str, Any]:
        """Path → the h5py dataset of its values; to be read, after `close` as well."""
        with self._lock:
            if self._writer is not None:
                return {p: group["values"] for p, group in self._writer.groups().items()}
            if not self._reading and self.path.exists():
                self._reading = h5py_or_say().File(self.path, "r")
            if not self._reading:
                return {}
            return {path_of(link): group["values"] for link, group in self._reading.items()}

    def __call__(
        self, name: str, values: list[Any], iterations: list[Any], ranks: list[Any]
    ) -> None:
        """Append the values of a path to its dataset, and take them out of the lists.

        What does not fit stays in the lists, and the first reason is raised.
        """
        if not len(values) == len(iterations) == len(ranks):
            raise TensortapError(
                f"{name}: {len(values)} values, {len(iterations)} iterations and {len(ranks)} ranks"
                f": a callback before this one must change all three lists"
            )
        with self._lock:
            if not values:
                return
            known = [
                {"iterations": iteration, "ranks": rank}
                for iteration, rank in zip(iterations, ranks, strict=True)
            ]
            failed = self._write(name, values, known)
        for items in (values, iterations, ranks):
            items[:] = [items[i] for i in failed]
        for error in failed.values():
            raise TensortapError(f"{name} to {self.path}: {error}") from error

    def _write(
        self, name: str, values: list[Any], known: list[dict[str, Any]]
    ) -> dict[int, TensortapError]:
        writer = self._writer or self._open()
        before = writer.unflushed
        try:
            failed = writer.extend(name, values, known)
            self._calls += 1
            if self._is_time():
                self._flush(writer)
            return failed
        except BaseException as error:
            # half done: the library's picture of the file is worth nothing now
            self._writer = None
            self._closer.detach()
            writer.abandon()
            if not isinstance(error, Exception):
                raise
            also = f", and {before} values since the last flush are lost" if before else ""
            raise TensortapError(
                f"{name} can't be written to {self.path}{also}: {error}"
            ) from error

    def _is_time(self) -> bool:
        if self._flush_every is not None:
            return self._calls >= self._flush_every
        return time.monotonic() - self._flushed_at >= _PAUSE

    def _flush(self, writer: Writer) -> None:
        writer.flush()
        self._calls = 0
        self._flushed_at = time.monotonic()
        self._exists = "keep"  # it is ours by now

    def _open(self) -> Writer:
        if self._reading:
            self._reading.close()
            self._reading = None
        path = self._opened = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._exists == "refuse" and path.exists():
            raise there_already(path)
        writer = self._writer = Writer(path, self._exists, self._options)
        # with the program's end at the latest; h5py would be gone later
        self._closer = weakref.finalize(self, writer.close)
        return writer

    def flush(self) -> None:
        """Make all values so far part of the file."""
        with self._lock:
            if self._writer is not None:
                self._flush(self._writer)

    def close(self) -> None:
        """Flush and close; the next value opens the file again and is appended."""
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                self._closer.detach()
                try:
                    self._flush(writer)
                finally:
                    writer.close()
