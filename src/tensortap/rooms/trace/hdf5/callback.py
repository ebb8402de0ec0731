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

from tensortap.core.arguments import checked
from tensortap.core.errors import TensortapError
from tensortap.core.ranks import rank_and_world_size
from tensortap.rooms.trace.hdf5.writer import (
    HDF5Options,
    HDF5Writer,
    file_exists,
    import_h5py,
    link_name,
    path_of,
)

_EXISTS = ("refuse", "keep", "replace")
_FLUSH_INTERVAL = 0.2  # seconds; a flush costs as much as several rows


class HDF5:
    """A callback that moves traced values to an HDF5 file as they come.

    It removes the values from the lists that it is given; `datasets` has them from then on.
    `exists` says what to do with an existing file: ``refuse``, ``keep`` (append) or ``replace``.
    Values that were flushed survive the end of the process, however it ends. A flush follows a
    call when the last flush is a fifth of a second old.

    >>> import tempfile, numpy
    >>> saver = HDF5(tempfile.mkdtemp() + "/trace.h5")
    >>> values, iterations, ranks = [numpy.ones(3), numpy.zeros(3)], [0, 1], [0, 0]
    >>> saver("forward.x", values, iterations, ranks)
    >>> saver.close()
    >>> saver.datasets["forward.x"].shape, values
    ((2, 3), [])
    """

    @checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compression: str | int | None = None,
        compression_opts: Any = None,
        float_dtype: Any = None,
        int_dtype: Any = None,
        exists: str = "refuse",
    ) -> None:
        if exists not in _EXISTS:
            raise TensortapError(f"exists must be 'refuse', 'keep' or 'replace', got {exists!r}")
        self._given = Path(path).absolute()
        self._exists = exists
        self._options = HDF5Options(compression, compression_opts, float_dtype, int_dtype)
        self._flushed_at = -math.inf  # so that the first call is flushed
        self._lock = threading.RLock()
        self._opened: Path | None = None
        self._writer: HDF5Writer | None = None
        self._reading: Any = None
        self._closer: Any = None
        if exists == "refuse" and self.path.exists():
            raise file_exists(self.path)  # before the training, not after its first hour

    def __repr__(self) -> str:
        return f"HDF5({str(self._given)!r})"

    @property
    def path(self) -> Path:
        """The file; ranks other than 0 that keep values of their own have files of their own."""
        if self._opened is not None:
            return self._opened
        rank, _ = rank_and_world_size()
        given = self._given
        return given.with_name(f"{given.stem}_rank{rank}{given.suffix}") if rank else given

    @property
    def datasets(self) -> Mapping[str, Any]:
        """Path → the h5py dataset of its values, for reading; also after `close`."""
        with self._lock:
            file = self._writer.file if self._writer is not None else self._reading
            if not file and self.path.exists():
                file = self._reading = import_h5py().File(self.path, "r")
            groups = file.items() if file else ()
            return {path_of(link): group["values"] for link, group in groups}

    def __call__(
        self, name: str, values: list[Any], iterations: list[Any], ranks: list[Any]
    ) -> None:
        """Append the values of a path to its dataset, and remove them from the lists.

        Values that do not fit stay in the lists, and the first error is raised.
        """
        if not len(values) == len(iterations) == len(ranks):
            raise TensortapError(
                f"{name}: {len(values)} values, {len(iterations)} iterations and {len(ranks)} ranks"
                f": earlier callbacks must change all three lists"
            )
        if not values:
            return
        pairs = zip(iterations, ranks, strict=True)
        columns = [{"iterations": iteration, "ranks": rank} for iteration, rank in pairs]
        with self._lock:
            failed = self._write(name, values, columns)
        for items in (values, iterations, ranks):
            items[:] = [items[i] for i in failed]
        for error in failed.values():
            raise TensortapError(f"{name} to {self.path}: {error}") from error

    def _write(
        self, name: str, values: list[Any], columns: list[dict[str, Any]]
    ) -> dict[int, TensortapError]:
        try:
            writer = self._writer or self._open()
            if not writer.is_ours:
                raise TensortapError(f"this is a fork of the process that writes {self.path}")
            failed = writer.extend(link_name(name), values, columns)
            if time.monotonic() - self._flushed_at >= _FLUSH_INTERVAL:
                self._flush(writer)
            return failed
        except TensortapError:
            raise
        except Exception as error:  # such as a full disk
            raise TensortapError(f"{name} cannot be written to {self.path}: {error}") from error

    def _flush(self, writer: HDF5Writer) -> None:
        writer.flush()
        self._flushed_at = time.monotonic()

    def _open(self) -> HDF5Writer:
        if self._reading:
            self._reading.close()
            self._reading = None
        path = self._opened = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = self._writer = HDF5Writer(path, self._exists, self._options)
        self._exists = "keep"  # from now on the file is ours
        # at the end of the program at the latest, while h5py still works
        self._closer = weakref.finalize(self, writer.close)
        return writer

    def flush(self) -> None:
        """Make all values so far part of the file."""
        with self._lock:
            if self._writer is not None:
                self._flush(self._writer)

    def close(self) -> None:
        """Flush and close the file; the next value opens it again and is appended."""
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                self._closer.detach()
                try:
                    self._flush(writer)
                finally:
                    writer.close()
