"""Traced values of all ranks, gathered to the first of them.

Every rank but the first sends messages to the first, which receives them in the order of ranks:

    8 bytes           the size of the header
    the header        MessagePack: names, iterations, ranks, small values, sizes of the buffers
    the buffers       the bytes of larger tensors, one after the other

Nothing is pickled: of an object that is neither a tensor nor a number, text or a container of
these, only type and repr are sent. Messages are point to point, so ranks may gather different
numbers of times: the last message of a rank says that it is the last, and at its end the first
rank receives whatever the others still send.

The connections are separate from the user's: a gathering has no order relative to the reductions
of a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tensortap.core.errors import CaptureError, TensortapError
from tensortap.core.record import Opaque, TensorData, Value
from tensortap.core.values import map_leaves
from tensortap.live.messages import with_payloads
from tensortap.rooms.trace.results import TracedValues
from tensortap.values.adapters import safe_repr
from tensortap.values.protocol import type_name
from tensortap.values.rebuild import rebuild
from tensortap.values.registry import parts
from tensortap.values.snapshot import borrow

if TYPE_CHECKING:
    from tensortap.rooms.trace.torch import GlooChannel

Report = Callable[[str, Exception], None]
_Parts = Mapping[str, TracedValues[Any]]
_Gathered = dict[str, TracedValues[Any]]


class GatherMessage(msgspec.Struct, array_like=True):
    """A header: what a rank has kept since its last message, and whether it will send more."""

    last: bool
    sizes: list[int]
    columns: dict[str, TracedValues[Value]]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(GatherMessage)


class Gatherer:
    """Gathers the values of one tracer to the first rank of a group."""

    def __init__(self, group: Any, report: Report) -> None:
        self._group = group
        self._report = report
        self._channel: GlooChannel | None = None
        self._others: list[int] = []  # on the first rank: who has not sent the last message
        self._closed = False

    def connect(self) -> None:
        """Connect the ranks of the process group, if there is one; every rank has to call this."""
        if self._channel is not None or self._closed:
            return
        try:
            channels = (part.open_channel(self._group) for part in parts("tensortap.rooms.trace"))
            self._channel = next((each for each in channels if each is not None), None)
        except Exception as error:
            self._closed = True  # every rank keeps its own values
            self._report("gathering", error)
        if self._channel is not None and self._channel.is_first:
            self._others = list(self._channel.others)

    def gather(self, parts: _Parts, *, last: bool = False) -> _Gathered | None:
        """Return the parts of all ranks on the first one, None on the others.

        Without a group, return the parts as given. With `last`, the first rank waits for the last
        messages of all others.
        """
        self.connect()
        channel = self._channel
        if channel is None:
            return dict(parts)
        with channel.quiet():
            if channel.is_first:
                return self._receive_all(channel, parts, last)
            try:
                _send(channel, parts, last)
            except Exception:
                self.close()  # the values stay on this rank from now on
                raise
            return None

    def _receive_all(self, channel: GlooChannel, parts: _Parts, last: bool) -> _Gathered:
        gathered = {
            path: TracedValues(
                [channel.on_host(value) for value in part.values], part.iterations[:], part.ranks[:]
            )
            for path, part in parts.items()
        }
        waiting = list(self._others)
        while waiting:
            unfinished = []
            for rank in waiting:
                try:
                    message = _receive(channel, rank, gathered)
                except Exception as error:
                    self._others.remove(rank)
                    self._report("gathering", _disconnected(rank, error))
                    continue
                if message.last:
                    self._others.remove(rank)
                elif last:
                    unfinished.append(rank)
            waiting = unfinished
        return gathered

    def close(self) -> None:
        """Disconnect; a rank that still waits for this one gets an error."""
        channel, self._channel = self._channel, None
        self._closed = True
        if channel is not None:
            channel.close()


def _disconnected(rank: int, error: Exception) -> TensortapError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return TensortapError(
        f"rank {rank} disconnected: its traced values are no longer gathered: {reason}"
    )


def _send(channel: GlooChannel, parts: _Parts, last: bool) -> None:
    buffers: list[memoryview] = []

    def detach_payload(leaf: Value) -> Value:
        if not isinstance(leaf, TensorData) or isinstance(leaf.data, bytes):
            return leaf
        buffers.append(memoryview(leaf.data).cast("B"))
        return TensorData(leaf.framework, leaf.dtype, leaf.shape, len(buffers) - 1)

    columns = {
        path: TracedValues(
            [map_leaves(detach_payload, _node(value)) for value in part.values],
            part.iterations, part.ranks,
        )
        for path, part in parts.items()
    }  # fmt: skip
    header = _encode(GatherMessage(last, [len(buffer) for buffer in buffers], columns))
    channel.send(len(header).to_bytes(8))
    channel.send(header)
    for buffer in buffers:
        channel.send(buffer)


def _receive(channel: GlooChannel, rank: int, gathered: _Gathered) -> GatherMessage:
    """Receive the next message of a rank and add its values to `gathered`."""
    size = int.from_bytes(channel.receive(rank, 8))
    message = _decoder.decode(channel.receive(rank, size))
    blocks: list[memoryview] = [channel.receive(rank, size) for size in message.sizes]
    for column in message.columns.values():
        column.values[:] = [rebuild(with_payloads(value, blocks)) for value in column.values]
    for path, column in message.columns.items():  # only after everything was decoded
        gathered.setdefault(path, TracedValues()).extend(column)
    return message


def _node(value: Any) -> Value:
    try:
        return value if isinstance(value, Opaque) else borrow(value)
    except CaptureError:  # sparse, nested
        return Opaque(type_name(type(value)), safe_repr(value))
