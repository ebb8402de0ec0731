"""The messages between a training program and a live session.

A message is ``[kind, header]`` or ``[kind, header, body]``: the kind is one byte, the header a
struct in MessagePack, decoded with validation. Nothing is unpickled and nothing evaluated.

    client                                server
    HELLO  nonce                  ─▶
                                  ◀─      CHALLENGE  nonce, proof of the key
    PROOF  proof, who, arena      ─▶
                                  ◀─      WELCOME  credit, what it read in the arena
    RECORDS  many records         ─▶
    PART  a piece of a payload    ─▶
                                  ◀─      ACK  what it has, credit, freed blocks
    GOODBYE                       ◀▶

HELLO, CHALLENGE and REFUSED never change their form: they are what two versions of tensortap
tell each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from tensortap.errors import WireError
from tensortap.record import Fields, Items, Mapping, Record, TensorData, Value

PROTOCOL = 1
CHUNK = 1 << 20  # payloads travel in pieces: as fast as a bare socket, and a claim can't be huge
LARGEST_MESSAGE = 8 << 20
DEEPEST = 100  # containers in one another: what comes out of `arrays` is never deeper
BODY = -1  # the index of a PART that belongs to the body and not to a payload

HELLO, CHALLENGE, PROOF, WELCOME, REFUSED = b"H", b"C", b"P", b"W", b"X"
RECORDS, PART, ACK, SEGMENTS = b"R", b"D", b"A", b"S"
CONTROL, QUERY, REPLY, GOODBYE, PING = b"K", b"Q", b"Y", b"G", b"I"


# numbers that are added up must not leave 64 bits, whatever a stranger says
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
Cost = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class Hello(msgspec.Struct, frozen=True):
    """The first word of a client: role is ``source`` (it sends) or ``viewer`` (it asks)."""

    protocol: int
    version: str
    role: str
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True):
    """The server's answer: it proves that it has the key, and asks for the same."""

    protocol: int
    version: str
    nonce: bytes
    mac: bytes


class Refusal(msgspec.Struct, frozen=True):
    """No, and why, and which versions met."""

    reason: str
    protocol: int = PROTOCOL
    version: str = ""


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """A point of the program whose values can be shown."""

    name: str
    kind: str


class Arena(msgspec.Struct, frozen=True, array_like=True):
    """Where the client keeps a nonce that only a process on the same host can read."""

    pid: int
    fd: int


class Client(msgspec.Struct, frozen=True):
    """Who a client is."""

    id: bytes
    host: str = ""
    pid: int = 0
    rank: int = 0
    world_size: int = 1
    program: str = ""


class Proof(msgspec.Struct, frozen=True):
    """The client proves that it has the key, and says who it is and what it can show."""

    mac: bytes
    client: Client
    probes: tuple[Probe, ...] = ()
    arena: Arena | None = None


class Welcome(msgspec.Struct, frozen=True):
    """The server takes the client: how many bytes may be under way, and the nonce it read."""

    credit: int
    largest: int
    nonce: bytes | None = None
    host: str = ""
    pid: int = 0


class External(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A payload outside the body: a block of a segment, or (segment 0) parts that follow."""

    segment: Count
    offset: Count
    nbytes: Count


class SegmentOffer(msgspec.Struct, frozen=True, array_like=True):
    """A segment of the client's arena, to be opened under ``/proc/<pid>/fd/``."""

    number: Positive
    fd: Count
    nbytes: Positive


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """What the client has not sent, in all: nobody listened, or the queue was over budget."""

    unheard: Count = 0
    dropped: Count = 0
    failed: Count = 0


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The header of RECORDS: its body is a list of records, at once or in parts."""

    number: Positive
    body_nbytes: Count
    cost: Cost  # what it takes of the credit
    externals: tuple[External, ...] = ()
    segments: tuple[SegmentOffer, ...] = ()
    probes: tuple[Probe, ...] = ()
    tally: Tally = Tally()


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The header of PART: where its bytes belong."""

    number: int
    index: int
    offset: int


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """All batches up to `number` are there, but for the `refused`; blocks that are free again."""

    number: int
    credit: int
    freed: tuple[tuple[int, int], ...] = ()
    refused: tuple[int, ...] = ()


class Segments(msgspec.Struct, frozen=True, array_like=True):
    """Segments that the client has given back: nothing will refer to them again."""

    dropped: tuple[int, ...]


class Control(msgspec.Struct, frozen=True):
    """What the server asks of a client; an action that it does not know it leaves alone."""

    action: str
    names: tuple[str, ...] = ()
    arguments: dict[str, str] = {}


class Query(msgspec.Struct, frozen=True):
    """A viewer's question."""

    id: int
    what: str
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True):
    """The answer: an error, or a body, inline or in parts."""

    id: int
    error: str = ""
    body_nbytes: int = 0


class Goodbye(msgspec.Struct, frozen=True):
    """The last word of either side."""

    reason: str = ""


_HEADERS: dict[bytes, type[msgspec.Struct]] = {
    HELLO: Hello,
    CHALLENGE: Challenge,
    PROOF: Proof,
    WELCOME: Welcome,
    REFUSED: Refusal,
    RECORDS: Batch,
    PART: Part,
    ACK: Ack,
    SEGMENTS: Segments,
    CONTROL: Control,
    QUERY: Query,
    REPLY: Reply,
    GOODBYE: Goodbye,
    PING: Goodbye,
}
_decoders = {kind: msgspec.msgpack.Decoder(header) for kind, header in _HEADERS.items()}
_records = msgspec.msgpack.Decoder(list[Record])
_encode = msgspec.msgpack.Encoder().encode

Header = TypeVar("Header", bound=msgspec.Struct)


def message(kind: bytes, header: msgspec.Struct) -> list[bytes]:
    """The frames of a message without a body."""
    return [kind, _encode(header)]


def read_header(kind: bytes, frame: bytes | memoryview) -> msgspec.Struct:
    """The header of a message; WireError if it is not one."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise WireError(f"a message of unknown kind {kind[:8]!r}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"a {kind.decode()} message with a bad header: {error}") from None


def expect(header: msgspec.Struct, kind: type[Header]) -> Header:
    """The header, if it is of that kind."""
    if not isinstance(header, kind):
        raise WireError(f"{type(header).__name__} instead of {kind.__name__}")
    return header


def encode_records(records: list[Record], external: Callable[[Any], int | bytes]) -> bytes:
    """The body of RECORDS; of a payload that is not `bytes`, `external` gives index or bytes."""
    return msgspec.msgpack.Encoder(enc_hook=external).encode(records)


def decode_records(
    body: bytes | memoryview, blocks: list[Any], itemsize: Callable[[str], int]
) -> list[Record]:
    """The records of a body, their payloads in place; WireError if sizes do not agree."""
    try:
        records = _records.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"records that cannot be read: {error}") from None
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # most tensors of a batch are alike
    for i, record in enumerate(records):
        value = record.value
        if type(value) is TensorData:
            data = value.data
            if type(data) is bytes and sizes.get((value.dtype, value.shape)) == len(data):
                continue
            sizes[value.dtype, value.shape] = tensor_nbytes(value, itemsize)
        elif value is None or type(value) in _PLAIN:
            continue
        placed = place(value, blocks, itemsize)
        if placed is not value:
            records[i] = msgspec.structs.replace(record, value=placed)
    return records


_ENDLESS = 1 << 62
_PLAIN = (float, int, str, bool)


def place(value: Value, blocks: list[Any], itemsize: Callable[[str], int], depth: int = 0) -> Value:
    """The value with its payloads instead of their indices; itself where there are none."""
    if isinstance(value, TensorData):
        return _place_tensor(value, blocks, itemsize)
    depth += 1
    if depth > DEEPEST and isinstance(value, (Items, Mapping, Fields)):
        raise WireError(f"a value deeper than {DEEPEST} containers")
    if isinstance(value, Items):
        items = tuple([place(item, blocks, itemsize, depth) for item in value.items])
        return Items(value.kind, items)
    if isinstance(value, Mapping):
        keys = [place(key, blocks, itemsize, depth) for key, _ in value.items]
        items = tuple([place(item, blocks, itemsize, depth) for _, item in value.items])
        return Mapping(tuple(zip(keys, items, strict=True)))
    if isinstance(value, Fields):
        values = tuple([place(item, blocks, itemsize, depth) for item in value.values])
        if len(values) != len(value.names):
            raise WireError(f"{value.type!r} has {len(value.names)} names, {len(values)} values")
        return Fields(value.kind, value.type, value.names, values)
    return value


def tensor_nbytes(tensor: TensorData, itemsize: Callable[[str], int]) -> int:
    """How many bytes a tensor has by what it says of itself."""
    try:
        size = itemsize(tensor.dtype)
    except Exception as error:
        raise WireError(f"a tensor of unknown dtype {tensor.dtype[:60]!r}: {error}") from None
    empty = False
    for length in tensor.shape:
        # at once: the product of a long shape would take hours, and no array can be that large
        if not 0 <= length < _ENDLESS or size >= _ENDLESS:
            raise WireError(f"a tensor of shape {str(tensor.shape[:8])[:200]}")
        if length:
            size *= length
        else:
            empty = True
    if size >= _ENDLESS:
        raise WireError(f"a tensor of shape {str(tensor.shape[:8])[:200]}")
    return 0 if empty else size


def _place_tensor(
    tensor: TensorData, blocks: list[Any], itemsize: Callable[[str], int]
) -> TensorData:
    size = tensor_nbytes(tensor, itemsize)
    data = tensor.data
    if type(data) is bytes:
        held = len(data)
    elif type(data) is int and 0 <= data < len(blocks):
        data = blocks[data]
        held = data.nbytes
        tensor = TensorData(tensor.framework, tensor.dtype, tensor.shape, data)
    else:
        raise WireError("a tensor whose bytes are nowhere")
    if held != size:
        raise WireError(
            f"a tensor of {tensor.dtype} {list(tensor.shape)} claims {size} bytes and has {held}"
        )
    return tensor
