"""Messages between a training program or a viewer (the clients) and a server.

A message is ``[kind, header]`` or ``[kind, header, body]``: the kind is one byte, the header a
struct in MessagePack, which is validated when it is decoded. Nothing is unpickled or evaluated.

    client                                server
    HELLO  version, client, arena ─▶
                                  ◀─      WELCOME  credit, nonce read from the arena
    RECORDS  a batch of records   ─▶
    CHUNK  a piece of a payload   ─▶
                                  ◀─      ACK  last batch, credit
                                  ◀─      CONTROL  a question about probes, or a change
    STATE  the answer             ─▶
    QUERY  a viewer's question    ─▶
                                  ◀─      REPLY, then CHUNKs of its body
    GOODBYE                       ◀▶

All of it is inside CURVE, whose handshake proves that both sides have the key. The first two
fields of HELLO and all of REFUSED never change: two versions of tensortap use them to tell each
other that they do not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec

from tensortap._version import __version__
from tensortap.core.columns import Column, Columns, split
from tensortap.core.dtypes import tensor_nbytes
from tensortap.core.errors import TensortapError, WireError
from tensortap.core.probes import ProbeRequest
from tensortap.core.record import Record, TensorData, Value
from tensortap.core.values import map_leaves

PROTOCOL = 6
CHUNK_NBYTES = 1 << 20  # as fast as larger ones, and no message claims a huge allocation
# bytes of a frame: ZeroMQ holds one of each connection without the key, until it is disconnected
LARGEST_FRAME = CHUNK_NBYTES + (4 << 10)
BODY = -1  # the index of a CHUNK that belongs to the body and not to a payload

HELLO, WELCOME, REFUSED = b"H", b"W", b"X"
RECORDS, CHUNK, ACK = b"R", b"D", b"A"
QUERY, REPLY, GOODBYE = b"Q", b"Y", b"G"
CONTROL, STATE = b"C", b"S"

# sums of these must fit into 64 bits, whatever a client claims
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
Cost = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class Refusal(msgspec.Struct, frozen=True):
    """The server rejects the client: why, and the server's versions."""

    reason: str
    protocol: int = PROTOCOL
    version: str = ""


class Arena(msgspec.Struct, frozen=True, array_like=True):
    """A shared memory segment of the client with a nonce: reading it proves a common host."""

    pid: int
    fd: int


class Client(msgspec.Struct, frozen=True):
    id: bytes
    host: str = ""
    pid: int = 0
    rank: int = 0
    world_size: int = 1
    program: str = ""  # its path


class Hello(msgspec.Struct, frozen=True):
    """The first message of a client; its role is ``source`` (sends) or ``viewer`` (asks)."""

    protocol: int
    version: str
    role: str = ""
    client: Client = Client(b"")
    arena: Arena | None = None


def hello(role: str, client: Client, arena: Arena | None = None) -> Hello:
    """Return the first message of a client of this version."""
    return Hello(PROTOCOL, __version__, role, client, arena)


class Welcome(msgspec.Struct, frozen=True):
    """The server accepts the client; `credit` is how many bytes may be in flight.

    `largest` is the largest record that the server can hold, `nonce` what it read in the arena.
    """

    credit: int
    largest: int
    nonce: bytes | None = None


class External(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A payload outside the body: a block of a segment, or (segment 0) chunks that follow."""

    segment: Count
    offset: Count
    nbytes: Count


class SegmentOffer(msgspec.Struct, frozen=True, array_like=True):
    """The client's arena, to be opened under ``/proc/<pid>/fd/``."""

    number: Positive
    fd: Count
    nbytes: Positive


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The header of RECORDS; the body has the records: sent with it, in chunks, or shared."""

    number: Positive
    body_nbytes: Count
    cost: Cost  # bytes of credit that the batch uses
    externals: tuple[External, ...] = ()
    segments: tuple[SegmentOffer, ...] = ()
    dropped: dict[str, Count] = {}  # what the client has not sent so far, by reason
    shared_body: External | None = None  # the block of a segment that holds the body
    columns: tuple[Column, ...] = ()  # if there are any, the body is a block of them
    rows: Count = 0  # records of that block


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The header of CHUNK: which bytes of which payload of which batch or reply follow."""

    number: int
    index: int
    offset: int


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """The server has all batches up to `number` except the `rejected` ones.

    `credit` is given back to the client, which may use the blocks of these batches again.
    """

    number: int
    credit: int
    rejected: tuple[int, ...] = ()


class Query(msgspec.Struct, frozen=True):
    """A viewer's question, see `tensortap.live.answers`."""

    id: int
    what: str
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True):
    """The answer to a question: an error, or a body that follows in chunks."""

    id: int
    error: str = ""
    body_nbytes: int = 0


class Control(msgspec.Struct, frozen=True):
    """The server asks a program for its probes, or for a change of them."""

    number: Positive
    pattern: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    request: ProbeRequest | None = None


class State(msgspec.Struct, frozen=True):
    """The answer to CONTROL; the body is a `ProbeAnswer`."""

    number: Positive


class Goodbye(msgspec.Struct, frozen=True):
    """The last message of either side."""


_HEADERS: dict[bytes, type[msgspec.Struct]] = {
    HELLO: Hello,
    WELCOME: Welcome,
    REFUSED: Refusal,
    RECORDS: Batch,
    CHUNK: Chunk,
    ACK: Ack,
    QUERY: Query,
    REPLY: Reply,
    CONTROL: Control,
    STATE: State,
    GOODBYE: Goodbye,
}
_decoders = {kind: msgspec.msgpack.Decoder(header) for kind, header in _HEADERS.items()}
_records = msgspec.msgpack.Decoder(list[Record])
_encode = msgspec.msgpack.Encoder().encode
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def message(kind: bytes, header: msgspec.Struct) -> list[bytes]:
    """Return the frames of a message without a body."""
    return [kind, _encode(header)]


def chunks(number: int, index: int, payload: memoryview) -> Iterator[list[Any]]:
    for offset in range(0, payload.nbytes, CHUNK_NBYTES):
        header = message(CHUNK, Chunk(number, index, offset))
        yield [*header, payload[offset : offset + CHUNK_NBYTES]]


def read_header(kind: bytes, frame: bytes | memoryview) -> msgspec.Struct:
    """Return the header of a message; raise WireError if it is malformed."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise WireError(f"a message of unknown kind {kind[:8]!r}")
    try:
        return decoder.decode(frame)
    except _UNREADABLE as error:
        raise WireError(f"a {kind.decode()} message with a bad header: {error}") from None


def encode_records(
    records: list[Record], external: Callable[[Any], int | bytes] | None = None
) -> bytes:
    """Return the body of RECORDS.

    `external` is called for each payload that is not `bytes`: it returns the index of the payload
    outside the body, or its bytes.
    """
    return msgspec.msgpack.Encoder(enc_hook=external).encode(records)


def decode_records(body: bytes | memoryview, payloads: list[Any]) -> list[Record]:
    """Return the records of a body with their payloads; raise WireError if anything is wrong."""
    try:
        records = _records.decode(body)
    except _UNREADABLE as error:
        raise WireError(f"records that cannot be decoded: {error}") from None
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # most tensors of a batch are alike
    for i, record in enumerate(records):
        value = record.value
        if type(value) is TensorData:
            data = value.data
            if type(data) is bytes and sizes.get((value.dtype, value.shape)) == len(data):
                continue
            sizes[value.dtype, value.shape] = _nbytes(value.dtype, value.shape)
        elif value is None or type(value) in _PLAIN:
            continue
        complete = with_payloads(value, payloads)
        if complete is not value:
            records[i] = msgspec.structs.replace(record, value=complete)
    return records


def decode_columns(columns: tuple[Column, ...], count: int, body: bytes) -> list[Columns]:
    """Return the columns in a body that have records; raise WireError if anything is wrong."""
    try:
        return split(columns, [_column_size(column) for column in columns], count, body)
    except ValueError as error:
        raise WireError(f"columns that cannot be decoded: {error}") from None


def _column_size(column: Column) -> int:
    if not column.is_number:
        return _nbytes(column.dtype, column.shape)
    if column.dtype or column.shape:
        raise WireError(f"numbers of dtype {column.dtype[:60]!r} and shape {column.shape[:8]}")
    return 8


_PLAIN = (float, int, str, bool)


def with_payloads(value: Value, payloads: list[Any]) -> Value:
    """Return the value with payloads in place of their indices; raise WireError on a mismatch."""

    def replace_index(leaf: Value) -> Value:
        return _with_payload(leaf, payloads) if isinstance(leaf, TensorData) else leaf

    try:
        return map_leaves(replace_index, value)
    except WireError:
        raise
    except TensortapError as error:  # nested too deeply
        raise WireError(str(error)) from None


def _with_payload(tensor: TensorData, payloads: list[Any]) -> TensorData:
    expected = _nbytes(tensor.dtype, tensor.shape)
    data = tensor.data
    if type(data) is bytes:
        nbytes = len(data)
    elif type(data) is int and 0 <= data < len(payloads):
        data = payloads[data]
        nbytes = data.nbytes
        tensor = TensorData(tensor.framework, tensor.dtype, tensor.shape, data)
    else:
        raise WireError("a tensor without its bytes")
    if nbytes != expected:
        raise WireError(
            f"a tensor of {tensor.dtype} {list(tensor.shape)} needs {expected} bytes, got {nbytes}"
        )
    return tensor


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    try:
        return tensor_nbytes(dtype, shape)
    except ValueError as error:
        raise WireError(str(error)) from None
