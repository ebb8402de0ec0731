"""Messages: round trips, and WireError for everything malformed."""

from __future__ import annotations

import random
import struct
import time

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.core.buffers import Pool
from tensortap.core.columns import Column, merged
from tensortap.core.dtypes import DTYPES, itemsize
from tensortap.core.errors import WireError
from tensortap.core.record import Items, Kind, Mapping, Record, Shard, Summary, TensorData
from tensortap.core.values import DEPTH
from tensortap.live import messages as wire


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = itemsize(dtype)
    for length in shape:
        size *= length
    framework = draw(st.sampled_from(["numpy", "numpy.generic", "torch", "jax"]))
    return TensorData(framework, dtype, shape, draw(st.binary(min_size=size, max_size=size)))


@given(st.lists(tensors(), max_size=4))
@settings(max_examples=50)
@pytest.mark.slow
def test_records_round_trip(held):
    """`test_round_trip_of_any_tree` has every kind of value."""
    sent = [*some_records(), *(Record("x", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=t) for t in held)]
    body = wire.encode_records(sent)
    assert wire.decode_records(body, []) == sent
    assert wire.decode_records(memoryview(bytearray(body)), []) == sent


@given(st.lists(tensors(), min_size=1, max_size=5))
@settings(max_examples=40)
@pytest.mark.slow
def test_external_payloads_round_trip(held):
    """The body refers to payloads by index, wherever they are in a value."""
    pool = Pool(shared=False)
    outside, leased = [], []
    for tensor in held:
        lease = pool.acquire(len(tensor.data))
        lease.writable[:] = tensor.data
        leased.append(TensorData(tensor.framework, tensor.dtype, tensor.shape, lease))
    tree = Items("list", (Mapping((("a", leased[0]),)), *leased[1:]))
    record = Record("x", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=tree)

    def external(block):
        outside.append(block)
        return len(outside) - 1

    body = wire.encode_records([record], external)
    assert len(outside) == len(held)
    found = wire.decode_records(body, outside)[0].value
    tensors_found = [found.items[0].items[0][1], *found.items[1:]]
    assert [bytes(t.data.view) for t in tensors_found] == [t.data for t in held]
    with pytest.raises(WireError, match=r"without its bytes|needs"):
        wire.decode_records(body, outside[:-1])


COLUMNS = (
    Column("loss", Kind.VALUE, 0, 1, "builtins.float", "float", "", ()),
    Column("x", Kind.VALUE, 2, 4, "torch.Tensor", "torch", "bfloat16", (2, 3)),
)


def block(*rows: tuple[int, ...], payload: int) -> bytes:
    """Return the body of a block of columns."""
    return np.array(rows, "<i8").tobytes() + bytes(range(payload))


BLOCK = block((1, 7, 0, 3, 10), (0, 7, 1, 4, 11), (1, 8, 0, 5, 12), payload=8 + 2 * 12)


def test_columns_are_the_records_of_a_block():
    first, second = wire.decode_columns(COLUMNS, 3, BLOCK)
    loss, _ = struct.unpack("<dQ", BLOCK[120:136])
    one, other = (TensorData("torch", "bfloat16", (2, 3), BLOCK[i : i + 12]) for i in (128, 140))
    fields = (2, 4, 10, "torch.Tensor", "bfloat16", (2, 3))
    assert merged([first, second]) == [
        Record("x", Kind.VALUE, 7, 0, 3, *fields, value=one),
        Record("loss", Kind.VALUE, 7, 1, 4, 0, 1, 11, "builtins.float", value=loss),
        Record("x", Kind.VALUE, 8, 0, 5, *fields[:2], 12, *fields[3:], value=other),
    ]
    assert merged(wire.decode_columns(COLUMNS[:1], 0, b"")) == []


@pytest.mark.parametrize(
    ("columns", "count", "body", "why"),
    [
        (COLUMNS, 4, BLOCK, "column that does not exist|bytes"),
        (COLUMNS, 1 << 62, BLOCK, "records in"),
        (COLUMNS, 2, BLOCK, "bytes of payloads expected"),
        (COLUMNS, 3, BLOCK[:-1], "bytes of payloads expected"),
        (COLUMNS, 3, BLOCK + b"0", "bytes of payloads expected"),
        (COLUMNS, 0, b"0", "bytes of payloads expected"),
        (COLUMNS[:1], 3, BLOCK, "column that does not exist"),
        (COLUMNS, 1, block((-1, 0, 0, 0, 0), payload=8), "column that does not exist"),
        (COLUMNS, 1, block((1 << 62, 0, 0, 0, 0), payload=8), "column that does not exist"),
        ("numpy", "int8", (1 << 61,), "bytes of payloads expected"),
        ("numpy", "int8", (1 << 40, 1 << 40), "a tensor of shape"),
        ("numpy", "int8", (-8,), "a tensor of shape"),
        ("numpy", "no such", (8,), "no dtype is called"),
        ("float", "int8", (8,), "numbers of dtype"),
        ("int", "", (1,), "numbers of dtype"),
    ],
)
@pytest.mark.attack("lies about sizes")
def test_rejects_malformed_columns(columns, count, body, why):
    if isinstance(columns, str):
        columns = (Column("x", Kind.VALUE, 0, 1, "t", columns, count, body),)
        count, body = 1, block((0, 0, 0, 0, 0), payload=8)
    with pytest.raises(WireError, match=why):
        wire.decode_columns(columns, count, body)


@pytest.mark.attack("lies about sizes")
def test_many_columns_take_no_time():
    """The work grows with the message, not with columns times records."""

    def seconds(count):
        columns = tuple([Column(f"{i}", Kind.VALUE, 0, 1, "", "int", "", ()) for i in range(count)])
        rows = np.zeros((count, 5), "<i8")
        rows[:, 0] = np.arange(count)[::-1]
        start = time.thread_time()
        assert len(wire.decode_columns(columns, count, rows.tobytes() + bytes(8 * count))) == count
        return time.thread_time() - start

    # about ten times as long, where the other law gives a hundred
    assert any(seconds(20_000) < 40 * seconds(2000) for _ in range(10))


HEADERS = [
    (wire.HELLO, wire.hello("source", wire.Client(bytes(16)), wire.Arena(7, 3))),
    (wire.WELCOME, wire.Welcome(1 << 28, 1 << 33, bytes(16))),
    (wire.REFUSED, wire.Refusal("no")),
    (
        wire.RECORDS,
        wire.Batch(
            7,
            100,
            612,
            (wire.External(1, 4096, 512),),
            (wire.SegmentOffer(1, 9, 8192),),
            {"over budget": 1, "disconnected": 2},
        ),
    ),
    (wire.RECORDS, wire.Batch(8, 128, 600, columns=COLUMNS, rows=2)),
    (wire.CHUNK, wire.Chunk(7, 0, 1 << 20)),
    (wire.ACK, wire.Ack(7, 612, (6,))),
    (wire.QUERY, wire.Query(3, "load", {"name": "x", "seq": 1})),
    (wire.REPLY, wire.Reply(3, "", 100)),
    (wire.GOODBYE, wire.Goodbye()),
]


@pytest.mark.parametrize(("kind", "header"), HEADERS)
def test_headers_round_trip(kind, header):
    frames = wire.message(kind, header)
    assert wire.read_header(*frames) == header


@pytest.mark.parametrize(("kind", "header"), HEADERS)
def test_rejects_truncated_headers(kind, header):
    frame = wire.message(kind, header)[1]
    for length in range(len(frame)):
        with pytest.raises(WireError, match="bad header"):
            wire.read_header(kind, frame[:length])


def some_records():
    tensor = TensorData("torch", "bfloat16", (2, 3), bytes(12))
    tree = Mapping((("a", Items("tuple", (tensor, 1.5, None, True, "text"))), ("b", 2**40)))
    stats = Summary(6, 6, 0, 0, 0, *[0.0] * 10, -3, (1, 2))
    full = Record(
        "loss", Kind.GRADIENT, 4, 1, 9, 2, 8, 1 << 60, "torch.Tensor", "bfloat16", (2, 3),
        Shard((4, 3), (2, 0), ("Shard(0)",)), bytes(16), tree, stats, {"mode": "train"},
    )  # fmt: skip
    return [full, Record("x", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=tensor)]


def test_rejects_truncated_records():
    body = wire.encode_records(some_records())
    for length in range(len(body)):
        with pytest.raises(WireError):
            wire.decode_records(body[:length], [])


def test_version_messages_never_change():
    """Two versions use these messages to tell each other that they do not match."""
    for fields in ({}, {"role": "source", "nonce": b"n"}, {"role": "", "new": [1]}):
        hello = msgspec.msgpack.encode({"protocol": 1, "version": "v", **fields})
        read = wire.read_header(b"H", hello)
        assert (read.protocol, read.version) == (1, "v")
    assert msgspec.msgpack.decode(wire.message(wire.HELLO, read)[1])["protocol"] == 1
    assert wire.message(wire.REFUSED, wire.Refusal("r", 1, "v")) == [
        b"X",
        msgspec.msgpack.encode({"reason": "r", "protocol": 1, "version": "v"}),
    ]
    # a newer version may add fields
    more = msgspec.msgpack.encode({"reason": "r", "protocol": 9, "version": "v", "new": [1]})
    assert wire.read_header(b"X", more) == wire.Refusal("r", 9, "v")


def deep(depth):
    value = 1
    for _ in range(depth):
        value = Items("list", (value,))
    return Record("deep", Kind.VALUE, 0, 0, 0, 0, 1, 0, value=value)


def test_rejects_values_nested_too_deeply():
    body = wire.encode_records([deep(DEPTH)])
    assert wire.decode_records(body, []) == [deep(DEPTH)]
    with pytest.raises(WireError, match="deeper than 100 containers"):
        wire.decode_records(wire.encode_records([deep(DEPTH + 1)]), [])


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Return the data with some bytes flipped, removed, inserted or repeated."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if data:
                data[where % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[where : where + rng.randint(1, 8)]
            case 2:
                data[where:where] = rng.randbytes(rng.randint(1, 8))
            case 3 if data:
                data[where % len(data)] = rng.choice(
                    b"\x00\x7f\x80\x8f\x90\x9f\xc1\xc6\xdd\xdf\xff"
                )
            case _:
                data[where:where] = data[: rng.randint(0, 40)]
    return bytes(data)


@pytest.mark.attack("lies about sizes")
def test_claimed_lengths_allocate_nothing():
    """MessagePack has length prefixes, which may lie."""
    before = psutil.Process().memory_info().rss
    for head in (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(WireError):
            wire.decode_records(b"\x91\xdc\x00\x10" + head, [])
        with pytest.raises(WireError):
            wire.decode_records(head, [])
    assert psutil.Process().memory_info().rss - before < 64 << 20
