"""`tap.digest`: a small table that says which weights a model has, whatever their sharding."""

from __future__ import annotations

import collections
import dataclasses
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from tensortap.capture.catch import catch
from tensortap.core.arguments import check_text, check_whole, checked
from tensortap.core.errors import CaptureError, NotFound, TensortapError
from tensortap.core.ranks import rank_and_world_size
from tensortap.core.record import Kind, Record, Shard
from tensortap.rooms.align.rows import CASTS, Sums, added, digest_rows
from tensortap.rooms.align.watch import KEY, digest_text
from tensortap.values.adapters import adapter_of
from tensortap.values.registry import parts
from tensortap.values.snapshot import nbytes_of
from tensortap.values.view import array_of

SUFFIX = ".digest.json"
"""Suffix of digest files."""

FORMAT = 1
HISTORY = 16
"""Number of earlier versions in `Digest.history`."""

_PIECE = 8 << 20  # bytes that a thread digests at once; of a device, that are copied at once
_FEW = 1 << 20  # bytes that are not worth a second thread
_LARGEST = 64 << 20  # bytes of a file
_THREADS = 4
_DEPTH = 50  # of nested containers

Digits = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{40})?$")]
Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class DigestRow(msgspec.Struct, frozen=True):
    """One tensor: dtype, shape, and digests of its elements as hexadecimal digits.

    `casts` are those of a float32 tensor rounded to another dtype, `transposed` those of the
    transposed matrix by dtype. Without a digest, `unread` says why.
    """

    dtype: str
    shape: tuple[Length, ...]
    digest: Digits
    casts: dict[str, Digits] = {}
    transposed: dict[str, Digits] = {}
    unread: str = ""


class Digest(msgspec.Struct, frozen=True, kw_only=True):
    """The digests of a model's parameters and buffers, by name; `tap.compare` compares two.

    `history` are earlier versions, the newest first.
    """

    format: int = FORMAT
    source: str
    version: int | None = None
    rows: dict[str, DigestRow]
    history: tuple[Digest, ...] = ()

    def __repr__(self) -> str:
        number = f", version {self.version}" if self.version is not None else ""
        lines = [f"<digest of {len(self.rows):,} tensors by {self.source}{number}>"]
        width = max(map(len, list(self.rows)[:20]), default=0)
        for name, row in list(self.rows.items())[:20]:
            shape = f"{row.dtype} {list(row.shape)}"
            lines.append(f"  {name:{width}}  {shape:24}  {row.digest[:16] or row.unread}")
        if len(self.rows) > 20:
            lines.append(f"  … and {len(self.rows) - 20:,} more")
        return "\n".join(lines)

    def save(self, path: str | Path) -> Path:
        """Write the digest into a file; its name should end in ``.digest.json``."""
        path = Path(path)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(self))
        return draft.replace(path)  # a reader sees the old content or the new one

    def record(self, name: str, *, version: int) -> Digest:
        """Send the digest as a version of `name` to the live session and the open run.

        Call it in the trainer and in the engine: the session raises an alert about the first
        version that did not arrive. The history of what is returned has the versions before.
        """
        check_text("name", name)
        check_whole("version", version)
        past = _recorded.setdefault(name, collections.deque(maxlen=HISTORY))
        found = msgspec.structs.replace(self, version=version, history=tuple(past))
        bare = msgspec.structs.replace(found, history=())
        if not rank_and_world_size()[0]:
            catch({KEY: msgspec.json.encode(bare).decode()}, name)
        past.appendleft(bare)
        return found


_recorded: dict[str, collections.deque[Digest]] = {}  # the newest versions by name


@checked
def digest(model: Any, *, transposed: bool = False, history: Digest | None = None) -> Digest:
    """Return the digests of all weights of a model: equal for equal weights, however sharded.

    `model` is a module of torch, or dicts, lists and dataclasses of arrays. All ranks that share
    its weights must call it; only digests are exchanged. `transposed` digests transposed matrices,
    too. `history` is the digest of an earlier version.

    >>> import numpy as np
    >>> one, other = digest({"w": np.arange(3.0)}), digest({"w": np.ones(3)})
    >>> one.rows["w"].shape, one.rows == other.rows
    ((3,), False)
    """
    named = list(_named_tensors(model))
    if not named:
        raise TensortapError(f"model must hold tensors, got {type(model).__name__} without any")
    unique: dict[int, Weight] = {}
    for _, tensor in named:  # tied weights are digested once
        if id(tensor) not in unique:
            unique[id(tensor)] = Weight(tensor, transposed)
    weights = list(unique.values())
    jobs = [job for weight in weights for job in weight.jobs()]
    for (weight, _, _), sums in zip(jobs, _in_threads(jobs), strict=True):
        weight.add(sums)
    for part in parts(__package__):
        part.sum_over_ranks(weights)
    past: tuple[Digest, ...] = ()
    if history is not None:
        past = (msgspec.structs.replace(history, history=()), *history.history)
    return Digest(
        source=source(),
        rows={name: unique[id(tensor)].row() for name, tensor in named},
        history=past[:HISTORY],
    )


def load_digest(path: str | Path) -> Digest:
    """Read what `Digest.save` has written."""
    path = Path(path)
    if not path.is_file():
        raise NotFound(f"no such file: {path}")
    if path.stat().st_size > _LARGEST:
        raise TensortapError(f"{path} has more than {_LARGEST >> 20} MiB, so it is no digest")
    return _decoded(path.read_bytes(), str(path))


def recorded_digests(source: Any, name: str, last: int | None = None) -> list[Digest]:
    """Return what `Digest.record` has sent to a run or session, the oldest first, with history.

    Each has the earlier versions of the same program as its history.
    """
    reader = getattr(source, "reader", source)
    past: dict[str, collections.deque[Digest]] = {}
    result = []
    for record in reader.records(name, kind=Kind.VALUE, last=last):
        if (found := digest_in(reader.load(record))) is not None:
            before = past.setdefault(found.source, collections.deque(maxlen=HISTORY))
            result.append(msgspec.structs.replace(found, history=tuple(before)))
            before.appendleft(found)
    if not result:
        raise NotFound(f"no digest was recorded as {name!r}")
    return result


def digest_in(record: Record) -> Digest | None:
    """Return the digest that a record holds; None for any other record."""
    text = digest_text(record)
    return None if text is None else _decoded(text.encode(), record.name)


def _decoded(data: bytes, where: str) -> Digest:
    try:
        found = msgspec.json.decode(data, type=Digest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TensortapError(f"{where} is not a digest: {error}") from None
    if found.format != FORMAT:
        raise TensortapError(f"{where} has format {found.format}, which is newer: update tensortap")
    return found


def source() -> str:
    """Return the name of this program: script, process and machine."""
    script = os.path.basename(sys.argv[0] if sys.argv else "") or "python"
    return f"{script} (pid {os.getpid()} on {socket.gethostname()})"


# -- what a model holds ----------------------------------------------------------------------


def _named_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    for part in parts(__package__):
        found = part.named_tensors(model)
        if found is not None:
            yield from found
            return
    yield from _walk(model, "", 0)


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in nested containers; names are keys, joined by dots."""
    if depth > _DEPTH:
        raise TensortapError(f"model is nested deeper than {_DEPTH} containers at {path[:80]}")
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, collections.abc.Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", range(len(value)))
        items = zip(names, value, strict=False)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    elif adapter_of(type(value)).view is not None or adapter_of(type(value)).local_shard:
        yield path or "value", value
    for key, item in items:
        yield from _walk(item, f"{path}.{key}" if path else str(key), depth + 1)


class Piece(NamedTuple):
    """A part of a tensor in this process; None stands for all of it."""

    value: Any
    shard: Shard | None


class Weight:
    """One tensor of a model, and the sums of the pieces that this process has."""

    def __init__(self, tensor: Any, transposed: bool) -> None:
        self.tensor = tensor
        self.unread = ""
        self.pieces: list[Piece] = []
        self.dtype = ""
        self.shape: tuple[int, ...] = ()
        try:
            self.pieces = self._local()
            first = self.pieces[0]
            describe = adapter_of(type(first.value)).describe
            self.dtype, self.shape = describe(first.value)
            self.shape = self.shape if first.shard is None else first.shard.global_shape
        except CaptureError as error:
            self.pieces, self.unread = [], str(error)
        self.casts = CASTS if self.dtype == "float32" else ()
        self.transposed = transposed and len(self.shape) == 2
        forms = (1 + len(self.casts)) * (1 + self.transposed)
        self.sums: list[Sums] = [(0,) * 5] * forms

    def _local(self) -> list[Piece]:
        for part in parts(__package__):
            pieces: list[Piece] | None = part.pieces(self.tensor)
            if pieces is not None:
                return pieces
        return [Piece(self.tensor, None)]

    def jobs(self) -> Iterator[_Part]:
        """Yield parts of the pieces, cut along the first dimension, which threads digest."""
        for value, shard in self.pieces:
            view = adapter_of(type(value)).view
            array = view(value) if view is not None else None
            value = value if array is None else array
            shape, nbytes = tuple(value.shape), nbytes_of(value)
            whole = shape if shard is None else shard.global_shape
            if len(shape) != len(whole) or nbytes <= _PIECE:
                yield _Part(self, value, shard)
                continue
            first, *others = (0,) * len(shape) if shard is None else shard.offsets
            rows = max(1, _PIECE * shape[0] // nbytes)
            for start in range(0, shape[0], rows):
                place = Shard(whole, (first + start, *others))
                yield _Part(self, value[start : start + rows], place)

    def add(self, sums: list[Sums] | str) -> None:
        """Add the sums of a part; text says why it could not be read."""
        if isinstance(sums, str):
            self.unread = sums
        else:
            self.sums = [added(pair) for pair in zip(self.sums, sums, strict=True)]

    def row(self) -> DigestRow:
        """Return the row of the table."""
        if self.unread:
            return DigestRow(self.dtype, self.shape, "", unread=self.unread)
        texts = iter(map(as_text, self.sums))
        own, casts = next(texts), {cast: next(texts) for cast in self.casts}
        names = (self.dtype, *self.casts) if self.transposed else ()
        return DigestRow(self.dtype, self.shape, own, casts, {name: next(texts) for name in names})


def as_text(sums: Sums) -> str:
    """Return a digest as hexadecimal digits."""
    return "".join(f"{each:08x}" for each in sums)


def as_sums(text: str) -> Sums:
    """Return the sums of a digest, given its digits."""
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))


class _Part(NamedTuple):
    weight: Weight
    value: Any
    shard: Shard | None

    def run(self) -> list[Sums] | str:
        """Return the sums of this part, or why it cannot be read."""
        weight, shard = self.weight, self.shard
        try:
            array = array_of(self.value)
            if array is None:
                raise CaptureError(f"a {type(self.value).__name__} has no elements to read")
            found = digest_rows(array, weight.dtype, shard, weight.casts)
            if weight.transposed:
                turned = shard and Shard(shard.global_shape[::-1], shard.offsets[::-1])
                found += digest_rows(array.T, weight.dtype, turned, weight.casts)
        except (CaptureError, ValueError) as error:
            return str(error)
        return found


def _in_threads(jobs: list[_Part]) -> Iterator[list[Sums] | str]:
    nbytes = sum(nbytes_of(job.value) for job in jobs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = min(_THREADS, cores or 1, len(jobs))
    if threads < 2 or nbytes <= _FEW:
        yield from map(_Part.run, jobs)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="tensortap-digest") as pool:
        yield from pool.map(_Part.run, jobs)
