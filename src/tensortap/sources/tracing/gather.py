"""What was traced on all ranks, gathered to the first of them over torch.distributed.

Every rank but the first sends messages to the first, which takes them in the order of the ranks:

    two numbers       the size of the header, and of how many buffers it speaks
    the header        MessagePack: names, iterations, ranks, small values, sizes of the buffers
    the buffers       the bytes of larger tensors, one after the other, as they lie in memory

Nothing is pickled: of objects that are neither tensors nor numbers, texts or containers of
them, type and repr travel. Messages go from one to one, not to all, so that ranks may have
gathered different numbers of times: the last message of a rank says that it is the last, and the
first rank, at its end, takes what the others still send.

All this has connections of its own: a gathering stands in no order with the reductions that a
backward pass may have under way.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import datetime
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from tensortap.errors import CaptureError, TensortapError, WireError
from tensortap.frameworks.protocol import type_name
from tensortap.frameworks.rebuild import rebuild
from tensortap.frameworks.scalars import safe_repr
from tensortap.frameworks.snapshot import borrow
from tensortap.record import Fields, Items, Opaque, TensorData, Value
from tensortap.record import Mapping as Dict
from tensortap.sources.tracing.kept import Part
from tensortap.wire.messages import with_payloads

Report = Callable[[str, Exception], None]


class Column(msgspec.Struct, array_like=True):
    """The values of one path in a message."""

    values: list[Value]
    iterations: list[Any]
    ranks: list[Any]
    orders: list[Any]


class Message(msgspec.Struct, array_like=True):
    """A header: what a rank has kept since its last one, and whether it will send more."""

    last: bool
    sizes: list[int]
    columns: dict[str, Column]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


def _distributed() -> Any:
    """torch.distributed, where a process group of it is up; else None."""
    found = sys.modules.get("torch.distributed")
    if found is None or not getattr(found, "is_available", bool)():
        return None
    return found if found.is_initialized() else None


class Gatherer:
    """The way of one tracer to the first rank of a group."""

    def __init__(self, group: Any, report: Report) -> None:
        self._group = group
        self._report = report
        self._way: Way | None = None
        self._others: list[int] = []  # of the first rank: whose messages are still to come
        self._alone = False

    def connect(self) -> None:
        """Connect the ranks, where there is a process group; all of them do."""
        distributed = _distributed()
        if distributed is None or self._way is not None or self._alone:
            return
        if self._group is distributed.GroupMember.NON_GROUP_MEMBER:
            self._alone = True
            return
        members = distributed.get_process_group_ranks(self._group or distributed.group.WORLD)
        if len(members) < 2:
            self._alone = True
            return
        try:
            self._way = Way.open(distributed, self._group, members)
        except Exception as error:
            self._alone = True  # every rank keeps its own values
            self._report("gathering", error)
            return
        if self._way.first:
            self._others = members[1:]

    def gather(self, parts: Mapping[str, Part], *, last: bool = False) -> dict[str, Part] | None:
        """The parts of all ranks on the first one, None on the others; without a group, as given.

        With `last`, the first rank waits for the last messages of all others.
        """
        self.connect()
        way = self._way
        if way is None:
            return dict(parts)
        with _undisturbed():
            if not way.first:
                try:
                    _send(way, parts, last)
                except Exception:
                    self.close()  # the values stay here, now and from now on
                    raise
                return None
            return self._receive(way, parts, last)

    def _receive(self, way: Way, parts: Mapping[str, Part], last: bool) -> dict[str, Part]:
        found = {path: _on_cpu(part) for path, part in parts.items()}
        waiting = list(self._others)
        while waiting:
            again = []
            for rank in waiting:
                try:
                    message = _take(way, rank, found)
                except Exception as error:
                    self._others.remove(rank)
                    self._report("gathering", _lost(rank, error))
                    continue
                if message.last:
                    self._others.remove(rank)
                elif last:
                    again.append(rank)
            waiting = again
        return found

    def close(self) -> None:
        """Give up the way; whoever still waits for this rank is told so by the broken line."""
        way, self._way = self._way, None
        self._alone = True
        if way is not None:
            way.close()


def _lost(rank: int, error: Exception) -> TensortapError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return TensortapError(f"rank {rank} did not come: what it traces is gathered no more: {reason}")


def _undisturbed() -> contextlib.AbstractContextManager[Any]:
    from tensortap.frameworks.torch.tensors import quiet

    return quiet()


# a message


def _send(way: Way, parts: Mapping[str, Part], last: bool) -> None:
    buffers: list[memoryview] = []
    columns = {
        path: Column(
            [_outside(_node(value), buffers) for value in part.values],
            part.iterations, part.ranks, part.orders,
        )
        for path, part in parts.items()
    }  # fmt: skip
    header = _encode(Message(last, [len(buffer) for buffer in buffers], columns))
    way.send_numbers(len(header), len(buffers))
    way.send(memoryview(header))
    for buffer in buffers:
        way.send(buffer)


def _take(way: Way, rank: int, found: dict[str, Part]) -> Message:
    """The next message of a rank, its values added to what was found."""
    size, count = way.take_numbers(rank)
    message = _decoder.decode(way.take(rank, size))
    if len(message.sizes) != count:
        raise WireError(f"a header that speaks of {len(message.sizes)} buffers instead of {count}")
    blocks: list[memoryview] = [way.take(rank, size) for size in message.sizes]
    taken = {
        path: Part(
            [rebuild(with_payloads(value, blocks)) for value in column.values],
            column.iterations, column.ranks, column.orders,
        )
        for path, column in message.columns.items()
    }  # fmt: skip
    for path, part in taken.items():  # all of it is good
        found.setdefault(path, Part()).extend(part)
    return message


def _node(value: Any) -> Value:
    try:
        return value if isinstance(value, Opaque) else borrow(value)
    except CaptureError:  # sparse, nested: what is known of it
        return Opaque(type_name(type(value)), safe_repr(value))


def _outside(value: Value, buffers: list[memoryview]) -> Value:
    """The value, the larger payloads in it replaced by their numbers among the buffers."""
    if isinstance(value, TensorData):
        if isinstance(value.data, bytes):
            return value
        buffers.append(memoryview(value.data).cast("B"))
        return TensorData(value.framework, value.dtype, value.shape, len(buffers) - 1)
    if isinstance(value, Items):
        return Items(value.kind, tuple([_outside(item, buffers) for item in value.items]))
    if isinstance(value, Dict):
        return Dict(tuple([(_outside(k, buffers), _outside(v, buffers)) for k, v in value.items]))
    if isinstance(value, Fields):
        values = tuple([_outside(item, buffers) for item in value.values])
        return Fields(value.kind, value.type, value.names, values)
    return value


def _on_cpu(part: Part) -> Part:
    """The first rank's own values, where those of the others will be."""
    import torch

    values = [
        value.cpu() if isinstance(value, torch.Tensor) and not value.is_cpu else value
        for value in part.values
    ]
    return Part(values, list(part.iterations), list(part.ranks), list(part.orders))


# bytes


class Way:
    """Connections of our own between the ranks of a group, and bytes over them."""

    def __init__(self, line: Any, members: list[int], rank: int, device: Any) -> None:
        self._line = line
        self._members = members
        self._device = device
        self.first = rank == members[0]

    @classmethod
    def open(cls, distributed: Any, like: Any, members: list[int]) -> Way:
        """Connect the ranks of a group, with the same patience, over gloo where it can be had."""
        # not new_group(): all ranks would have to take part, whoever traces, and the name of
        # a group that was taken down would be given again, with addresses that are stale
        backend = "gloo" if distributed.is_gloo_available() else "nccl"
        make = distributed.ProcessGroupGloo if backend == "gloo" else distributed.ProcessGroupNCCL
        key = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        name = f"tensortap/{key}/{next(_numbers[key])}"
        store = distributed.PrefixStore(name, distributed.distributed_c10d._get_default_store())
        rank = distributed.get_rank()
        patience = _patience(like or distributed.group.WORLD)
        line = make(store, members.index(rank), len(members), patience)
        return cls(line, members, rank, device_for(backend))

    def _send(self, tensor: Any) -> None:
        self._line.send([tensor], 0, 0).wait()

    def _take(self, tensor: Any, rank: int) -> Any:
        self._line.recv([tensor], self._members.index(rank), 0).wait()
        return tensor.cpu()

    def send_numbers(self, *numbers: int) -> None:
        import torch

        self._send(torch.tensor(numbers, dtype=torch.int64, device=self._device))

    def take_numbers(self, rank: int) -> list[int]:
        import torch

        tensor = torch.empty(2, dtype=torch.int64, device=self._device)
        found: list[int] = self._take(tensor, rank).tolist()
        return found

    def send(self, data: memoryview) -> None:
        if data.nbytes:
            self._send(_over(data).to(self._device))

    def take(self, rank: int, size: int) -> memoryview:
        import torch

        if not size:
            return memoryview(b"")
        tensor = torch.empty(size, dtype=torch.uint8, device=self._device)
        return memoryview(self._take(tensor, rank).numpy())

    def close(self) -> None:
        """Hang up."""
        self._line = None


# how many ways there were between the same ranks: they have counted alike
_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def device_for(backend: str) -> Any:
    """Where the buffers of a backend must lie: nccl takes memory of its own device alone."""
    import torch

    kind = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}.get(backend)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, getattr(torch, kind).current_device())


def _patience(group: Any) -> datetime.timedelta:
    """The timeout that the user has given his group."""
    import torch

    for kind in ("cpu", "cuda"):
        with contextlib.suppress(Exception):  # it has no backend for that, or no options
            found = group._get_backend(torch.device(kind)).options._timeout
            if isinstance(found, datetime.timedelta):
                return found
    return datetime.timedelta(minutes=30)  # torch's own


def _over(data: memoryview) -> Any:
    """A tensor over memory that is only read; torch would warn of what it can't write."""
    import numpy
    import torch

    address = numpy.frombuffer(data, numpy.uint8).__array_interface__["data"][0]
    memory = (ctypes.c_char * data.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def gather(parts: dict[str, Part], group: Any = None) -> dict[str, Part] | None:
    """One gathering by itself: the parts of all ranks on the first one, None on the others."""
    errors: list[Exception] = []
    gatherer = Gatherer(group, lambda name, error: errors.append(error))
    try:
        found = gatherer.gather(parts, last=True)
    finally:
        gatherer.close()
    if errors:
        raise errors[0]
    return found
