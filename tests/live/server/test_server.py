"""Hostile messages: the server rejects and counts each, and other clients are not disturbed."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import socket
import time

import msgspec
import psutil
import pytest
from rich.console import Console

from tensortap.api import tables
from tensortap.core.buffers import Segment
from tensortap.core.record import Blob, Fields, Items, Mapping, Number, Opaque, TensorData
from tensortap.live import answers
from tensortap.live import messages as wire
from tensortap.live import server as module
from tensortap.live.reader import LiveReader
from tensortap.values import rebuild
from tests.commands import type_in
from tests.live.server.clients import RawClient, assert_serves, record
from tests.processes import wait_for

pytestmark = pytest.mark.slow

MIB = 1 << 20
pack = msgspec.msgpack.encode


def rss() -> int:
    return psutil.Process().memory_info().rss


@pytest.fixture
def raw(server):
    """A client that has completed the handshake."""
    with RawClient(server.address) as client:
        client.connect()
        yield client


def rejection(server, client, reason="invalid message") -> str:
    """Check that the rejection is counted; return the reason that the client receives."""
    words = client.receive_a(wire.Refusal).reason
    assert server.rejected == {reason: 1}
    return words


# -- other protocols ----------------------------------------------------------------------

NOISE = {
    "http": b"GET /?q=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "zeros": bytes(10_000),
    "ones": b"\xff" * 10_000,
    "short": b"x",
    "half a greeting": b"\xff" + bytes(8) + b"\x7f\x03",
    "old ZMTP": b"\x01\x00" + b"\x05\x00DDDD" * 100,
    "huge frame": b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48) + b"\x02" + b"\xff" * 8,
    "random": os.urandom(50_000),
}


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.attack("garbage on the wire")
def test_survives_other_protocols(server, bystander, noise):
    before = rss()
    for _ in range(5):
        with socket.create_connection(tuple(server.address), 60) as connection:
            try:
                connection.sendall(NOISE[noise])
                connection.settimeout(0.05)
                while connection.recv(4096):
                    pass
            except OSError:
                pass
    assert_serves(server)
    assert set(server.history.names()) == {"bystander", "later"}
    assert rss() - before < 64 * MIB


# -- frames ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 10])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.attack("garbage on the wire")
def test_rejects_a_wrong_number_of_frames(server, bystander, count, inside):
    with RawClient(server.address) as client:
        if inside:
            client.connect()
        client.send(*[b"R"] * count)
        assert client.receive_a(wire.Refusal)
        assert server.rejected["invalid message"] == 1


WRONG_TIME = {
    b"H": wire.hello("source", wire.Client(bytes(16))),
    b"R": wire.Batch(1, 1, 0),
    b"D": wire.Chunk(1, 0, 0),
    b"Q": wire.Query(1, "overview"),
    b"G": wire.Goodbye(),
    b"A": wire.Ack(1, 1),
    b"W": wire.Welcome(1, 1),
    b"Y": wire.Reply(1),
    b"X": wire.Refusal("x"),
}


@pytest.mark.parametrize("kind", [b"R", b"D", b"Q", b"G", b"A"])
@pytest.mark.attack("messages before the handshake")
def test_rejects_messages_before_the_hello(server, bystander, kind):
    with RawClient(server.address) as client:
        client.send_message(kind, WRONG_TIME[kind], b"\x90")
        assert "before the hello" in rejection(server, client)


@pytest.mark.parametrize("kind", [b"H", b"A", b"W", b"Y", b"X"])
def test_rejects_messages_of_servers(server, bystander, raw, kind):
    raw.send_message(kind, WRONG_TIME[kind])
    assert "at the wrong time" in rejection(server, raw)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", b"\x91" * 5000])
@pytest.mark.parametrize("kind", [b"H", b"R", b"S", b"x" * 10_000])
@pytest.mark.attack("garbage on the wire")
def test_rejects_malformed_headers(server, bystander, kind, frame):
    with RawClient(server.address) as client:
        client.send(kind, frame)
        assert len(rejection(server, client)) <= 1000


@pytest.mark.attack("garbage on the wire")
def test_rejects_unknown_roles(server, bystander):
    for role in ("", "root"):
        with RawClient(server.address) as client:
            assert "without a role" in client.hello(role=role).reason
    assert server.rejected["invalid message"] == 2


# -- claims ------------------------------------------------------------------------------

HUGE = 1 << 62
CLAIMS = {
    "a huge body": {"body_nbytes": HUGE},
    "a large body": {"body_nbytes": 1 << 40},
    "a huge payload": {"externals": (wire.External(0, 0, HUGE),)},
    "a large payload": {"externals": (wire.External(0, 0, 65 * MIB),)},
    "many payloads": {"externals": (wire.External(0, 0, MIB),) * 65},
    "many small payloads": {"externals": (wire.External(0, 0, 1),) * 100_000},
    "a huge sum": {"externals": (wire.External(0, 0, HUGE),) * 64},
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.attack("lies about sizes")
def test_claims_beyond_the_bound_allocate_nothing(server, bystander, raw, claim):
    before = rss()
    body = b"" if "body_nbytes" in CLAIMS[claim] else b"\x90"
    number = raw.send_batch(body, **CLAIMS[claim])
    ack = raw.receive_a(wire.Ack)
    assert ack.rejected == (number,)
    assert server.rejected == {"too large": 1}
    assert rss() - before < 16 * MIB
    # its chunks are ignored, and the next batch is stored
    raw.send_message(wire.CHUNK, wire.Chunk(number, 0, 0), b"x" * 1000)
    raw.send_batch(pack([record("after")]))
    assert raw.receive_a(wire.Ack).rejected == ()
    assert "after" in server.history.names()


@pytest.mark.parametrize(
    "fields",
    [
        {"body_nbytes": 5},
        {"body_nbytes": 0},
        {"body_nbytes": MIB},
        {"body_nbytes": -1},
        {"body_nbytes": 1 << 63},
        {"cost": 1 << 63},
        {"cost": -1},
        {"number": 0},
        {"number": -5},
        {"externals": (wire.External(0, 0, -1),)},
        {"externals": (wire.External(0, -1, 1),)},
        {"externals": (wire.External(-1, 0, 1),)},
        {"externals": (wire.External(0, 0, 1 << 63),)},
        {"segments": (wire.SegmentOffer(0, 3, 4096),)},
        {"segments": (wire.SegmentOffer(1, -3, 4096),)},
        {"segments": (wire.SegmentOffer(1, 3, 0),)},
        {"segments": (wire.SegmentOffer(1, 3, -4096),)},
        {"segments": (wire.SegmentOffer(1, 3, 4096),)},  # without an arena
        {"dropped": {"over budget": -1}},
        {"shared_body": wire.External(1, 0, 1)},  # with a body beside it
        {"shared_body": wire.External(1, 0, -1), "body_nbytes": -1},
    ],
)
@pytest.mark.attack("lies about sizes")
def test_rejects_impossible_numbers(server, bystander, raw, fields):
    before = rss()
    raw.send_batch(**fields)
    rejection(server, raw)
    assert rss() - before < 16 * MIB


def test_sums_of_costs_do_not_overflow(server, bystander, raw):
    for _ in range(200):
        raw.send_batch(cost=1 << 50)
    credit = 0
    while credit < 200 << 50:
        credit += raw.receive_a(wire.Ack).credit
    assert server.alive


def test_batches_out_of_order_and_repeated(server, bystander, raw):
    raw.send_batch(pack([record("a")]), number=5)
    assert raw.receive_a(wire.Ack).number == 5
    raw.send_batch(pack([record("a")]), number=5)  # sent again after a reconnect: stored once
    assert raw.receive_a(wire.Ack).number == 5
    raw.send_batch(pack([record("a")]), number=3)
    raw.receive_a(wire.Ack)
    assert len(server.history.records("a")) == 1
    raw.send_batch(number=9, externals=(wire.External(0, 0, 10),))  # waits for its chunks
    raw.send_batch(number=8)
    assert "out of order" in rejection(server, raw)


def tensor(nbytes, where=0, dtype="uint8"):
    return TensorData("numpy", dtype, (nbytes,), where)


def test_chunks_make_a_payload(server, bystander, raw):
    body = pack([record("whole", tensor(10))])
    number = raw.send_batch(body, externals=(wire.External(0, 0, 10),))
    raw.send_message(wire.CHUNK, wire.Chunk(number, 0, 0), b"01234")
    raw.send_message(wire.CHUNK, wire.Chunk(number, 0, 5), b"")
    raw.send_message(wire.CHUNK, wire.Chunk(number, 0, 5), b"56789")
    assert raw.receive_a(wire.Ack).number == number
    assert rebuild(server.history.records("whole")[0].value).tobytes() == b"0123456789"


CHUNKS = {
    "out of order": [(0, 5, 5)],
    "twice": [(0, 0, 5), (0, 0, 5)],
    "overlapping": [(0, 0, 5), (0, 4, 5)],
    "too long": [(0, 0, 11)],
    "too long at the end": [(0, 0, 5), (0, 5, 6)],
    "before the beginning": [(0, -5, 5)],
    "at the end of all": [(0, 1 << 62, 5)],
    "of another payload": [(1, 0, 5)],
    "of payload -2": [(-2, 0, 5)],
    "of a body that is there": [(wire.BODY, 0, 1)],
}


@pytest.mark.parametrize("manner", CHUNKS)
@pytest.mark.attack("lies about sizes")
def test_rejects_chunks_that_do_not_fit(server, bystander, raw, manner):
    number = raw.send_batch(pack([record("x", tensor(10))]), externals=(wire.External(0, 0, 10),))
    for index, offset, length in CHUNKS[manner]:
        raw.send_message(wire.CHUNK, wire.Chunk(number, index, offset), b"x" * length)
    assert rejection(server, raw)
    assert server.history.names() == ["bystander"]


def test_missing_chunks_block_nobody(server, bystander, raw):
    number = raw.send_batch(pack([record("x", tensor(10))]), externals=(wire.External(0, 0, 10),))
    raw.send_message(wire.CHUNK, wire.Chunk(number, 0, 0), b"x" * 9)
    assert_serves(server)
    raw.close()
    assert_serves(server)
    assert "x" not in server.history.names()


def test_rejects_chunks_without_a_batch(server, bystander, raw):
    raw.send_message(wire.CHUNK, wire.Chunk(77, 0, 0), b"x")
    assert "which does not exist" in rejection(server, raw)


def test_large_body_in_chunks(server, bystander, raw):
    body = pack([record("long", "x" * (3 * MIB))])
    raw.send_batch(body)
    assert raw.receive_a(wire.Ack).rejected == ()
    assert server.history.records("long")[0].value == "x" * (3 * MIB)


def test_reads_all_that_a_client_sent_before_it_ended(server, bystander, monkeypatch):
    """Also when the server is so busy that its socket is never drained, or stops for a while."""
    monkeypatch.setattr(module, "_DRAIN_ROUNDS", 10)
    pauses = itertools.cycle([0.02] * 19 + [0.4])
    store = server._store
    monkeypatch.setattr(server, "_store", lambda batch: time.sleep(next(pauses)) or store(batch))
    with RawClient(server.address) as client:
        client.connect()
        for i in range(60):
            client.send_batch(pack([record("x", i)]))
        client.context.destroy(linger=60_000)
    wait_for(lambda: len(server.history.records("x")) == 60)
    assert [r.value for r in server.history.records("x")] == list(range(60))
    assert not server.rejected


# -- segments ----------------------------------------------------------------------------


@pytest.fixture
def arena(server):
    """A client whose arena the server can map; its segment has number 1."""
    nonce = Segment(0, 4096, shared=True)
    segment = Segment(1, 8192, shared=True)
    segment.memory[:] = bytes(range(256)) * 32
    with RawClient(server.address) as client:
        assert client.connect(arena=wire.Arena(os.getpid(), nonce.fd)).nonce is not None
        client.segment = segment
        client.offer = wire.SegmentOffer(1, segment.fd, 8192)
        yield client


def external(client, offset, nbytes, number=1, offers=None):
    body = pack([record("shared", tensor(nbytes))])
    offers = (client.offer,) if offers is None else offers
    place = wire.External(number, offset, nbytes)
    return client.send_batch(body, externals=(place,), segments=offers)


def test_payload_in_a_segment(server, bystander, arena):
    external(arena, 4000, 192)
    assert arena.receive_a(wire.Ack).rejected == ()
    found = rebuild(server.history.records("shared")[0].value).tobytes()
    assert found == (bytes(range(256)) * 32)[4000:4192]


def test_body_in_a_segment(server, bystander, arena):
    body = pack([record("shared body", 1.5)])
    arena.segment.memory[100 : 100 + len(body)] = body
    place = wire.External(1, 100, len(body))
    arena.send_batch(b"", body_nbytes=len(body), shared_body=place, segments=(arena.offer,))
    assert arena.receive_a(wire.Ack).rejected == ()
    assert server.history.records("shared body")[0].value == 1.5


@pytest.mark.parametrize("what", ["payload", "body"])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(8192, 1), (0, 8193), (1 << 62, 1), (1 << 40, 4096), (4096, 1 << 20)]
)
@pytest.mark.attack("hostile shared memory")
def test_rejects_what_lies_beyond_its_segment(server, bystander, arena, offset, nbytes, what):
    before = rss()
    if what == "payload":
        external(arena, offset, nbytes)
    else:
        place = wire.External(1, offset, nbytes)
        arena.send_batch(b"", body_nbytes=nbytes, shared_body=place, segments=(arena.offer,))
    assert "beyond the end of its segment" in rejection(server, arena)
    assert rss() - before < 16 * MIB


def test_rejects_a_body_in_a_segment_that_it_cannot_read(server, bystander, arena):
    number = arena.send_batch(b"", body_nbytes=10, shared_body=wire.External(7, 0, 10))
    assert arena.receive_a(wire.Ack).rejected == (number,)
    assert server.rejected == {"unreadable segment": 1}


def test_rejects_a_chunk_for_a_payload_in_a_segment(server, bystander, arena):
    places = (wire.External(1, 0, 4096), wire.External(0, 0, 10))
    number = arena.send_batch(externals=places, segments=(arena.offer,))
    arena.send_message(wire.CHUNK, wire.Chunk(number, 0, 0), b"x" * 10)
    assert "in a segment" in rejection(server, arena)
    assert arena.segment.memory[:4] == b"\0\1\2\3"


def memfd(name, size, sealed=True):
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, 1033, 0x2 | 0x4)
    return fd


@pytest.mark.parametrize(
    "manner",
    ["unknown", "closed", "not sealed", "half sealed", "wrong size", "other name", "a file",
     "a pipe", "a socket", "the key"],
)  # fmt: skip
@pytest.mark.attack("hostile shared memory")
def test_rejects_invalid_segments(server, bystander, arena, tmp_path, manner):
    """The client learns that they cannot be mapped, and can send the bytes instead."""
    from tensortap.live import keys

    secret = tmp_path / "memfd:tensortap"
    secret.write_bytes(bytes(8192))
    half = memfd("tensortap", 8192, sealed=False)
    fcntl.fcntl(half, 1033, 0x4)
    fds = {
        "not sealed": memfd("tensortap", 8192, sealed=False),
        "half sealed": half,
        "wrong size": memfd("tensortap", 4096),
        "other name": memfd("secret", 8192),
        "a file": os.open(secret, os.O_RDONLY),
        "a pipe": os.pipe()[0],
        "a socket": socket.socket().detach(),
        "the key": os.open(keys.key_path(), os.O_RDONLY),
    }
    offers = () if manner == "unknown" else (wire.SegmentOffer(1, fds.get(manner, 9999), 8192),)
    number = external(arena, 0, 4096, offers=offers)
    assert arena.receive_a(wire.Ack).rejected == (number,)
    assert server.rejected == {"unreadable segment": 1}
    external(arena, 0, 4096)
    assert arena.receive_a(wire.Ack).rejected == ()
    for fd in fds.values():
        os.close(fd)


@pytest.mark.attack("hostile shared memory")
def test_arena_of_another_process_proves_nothing(server, bystander):
    for where in (wire.Arena(1, 0), wire.Arena(-1, -1), wire.Arena(1 << 63, 3), wire.Arena(0, 0)):
        with RawClient(server.address) as client:
            assert client.connect(arena=where).nonce is None


# -- values ------------------------------------------------------------------------------


def nested(depth, leaf=0):
    value = ["i", "list", [leaf]]
    for _ in range(depth):
        value = ["i", "list", [value]]
    return value


def row(value, name="x"):
    return [name, "Value", 0, 0, 0, 0, 1, 1, "", "", [], None, None, value, None, {}]


class Bytes:
    """MessagePack that no encoder would write."""

    @staticmethod
    def deep(depth: int) -> bytes:
        head = pack([row(None)])
        assert head.endswith(b"\xc0\xc0\x80")
        return head[:-3] + (b"\x93\xa1i\xa4list\x91" * depth) + b"\x00" + b"\xc0\x80"


VALUES = {
    "too deep": pack([row(nested(100))]),
    "deeper": Bytes.deep(400),
    "deeper than Python": Bytes.deep(100_000),
    "unknown node": pack([row(["z", 1])]),
    "unknown dtype": pack([row(["t", "numpy", "float33", [1], b"1234"])]),
    "evil dtype": pack([row(["t", "numpy", "O", [1], b"12345678"])]),
    "dtype with fields": pack([row(["t", "numpy", "f4,O", [1], b"1" * 12])]),
    "long dtype": pack([row(["t", "numpy", "f" * MIB, [1], b"1234"])]),
    "too few bytes": pack([row(["t", "numpy", "float32", [2], b"1234"])]),
    "too many bytes": pack([row(["t", "numpy", "float32", [1], b"12345"])]),
    "no bytes": pack([row(["t", "numpy", "float32", [1], None])]),
    "text for bytes": pack([row(["t", "numpy", "uint8", [4], "1234"])]),
    "index of nothing": pack([row(["t", "numpy", "float32", [1], 0])]),
    "index below nothing": pack([row(["t", "numpy", "float32", [1], -1])]),
    "huge product": pack([row(["t", "numpy", "float32", [1 << 62, 1 << 62], b""])]),
    "huge product, empty": pack([row(["t", "numpy", "float32", [1 << 62, 4, 0], b""])]),
    "endless shape": pack([row(["t", "numpy", "float32", [(1 << 63) - 1] * 500_000, b""])]),
    "negative shape": pack([row(["t", "numpy", "float32", [-1, -1], b"1234"])]),
    "unequal fields": pack([row(["f", "dataclass", "a:B", ["x"], []])]),
    "a row too few": pack([row(None)[:5]]),
    "unknown kind": pack([["x", "Nothing", *row(None)[2:]]]),
    "text for a step": pack([["x", "Value", "0", *row(None)[3:]]]),
    "not a list": pack({"x": 1}),
    "nothing": b"",
    "bad utf-8": pack([row(None, "NAME")]).replace(b"NAME", b"\xff\xfe\xfd\xfc"),
    "cut": pack([row("a" * 100)])[:-3],
    "more": pack([row(None)]) + b"\x00",
}


@pytest.mark.parametrize("manner", VALUES)
@pytest.mark.attack("hostile records")
def test_rejects_malformed_records(server, bystander, raw, manner):
    number = raw.send_batch(VALUES[manner])
    answer = raw.receive()
    if isinstance(answer, wire.Ack):
        assert answer.rejected == (number,)
    else:
        assert manner == "nothing"
    assert server.rejected == {"invalid message": 1}
    assert server.history.names() == ["bystander"]


STRANGE = {
    "a number that is none": Number("int", text="0xZZ"),
    "a long number": Number("int", text="0x" + "f" * 100_000),
    "an endless complex": Number("complex", (1.0,) * 1000),
    "a container of no kind": Items("zip", (1, 2)),
    "a dict with a list for a key": Mapping(((Items("list", ()), 1),)),
    "a set of lists": Items("set", (Items("list", ()),)),
    "a class with bad fields": Fields("dataclass", "os:system", ("__class__", "x y"), (1, 2)),
    "a class of no kind": Fields("magic", "builtins:eval", ("a",), (1,)),
    "a framework of no name": TensorData("cupy", "float32", (1,), b"1234"),
    "an empty tensor": TensorData("torch", "float32", (3, 0, 5), b""),
    "many dimensions": TensorData("numpy", "uint8", (1,) * 500, b"1"),
    "many dimensions, torch": TensorData("torch", "uint8", (1,) * 500, b"1"),
    "escape sequences": Opaque("\x1b[31m", "\x1b]0;owned\x07"),
    "rich markup": Opaque("[red]", "[link=http://x]click[/link] :smile:"),
    "bytes": Blob("bytes", b"\x1b[2J" * 1000),
    "a torch dtype of NumPy": TensorData("torch", "<M8[ns]", (1,), b"12345678"),
    "a jax dtype of torch": TensorData("jax", "bits4x2", (1,), b"1"),
    "text": "\x1b[2J\x00\x07\u202e" * 100,
    "wide": Items("list", (0,) * 50_000),
}


def shown(server) -> str:
    """Return what `tap.summary()` prints to a terminal."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=200)
    console.print(tables.summary(answers.overview(server)))
    return out.getvalue()


@pytest.mark.parametrize("manner", STRANGE)
@pytest.mark.attack("hostile records")
def test_strange_values_can_be_shown(server, bystander, raw, manner):
    """Values that are well formed, but that tensortap never sends."""
    raw.send_batch(pack([record("strange", STRANGE[manner])]))
    raw.receive_a(wire.Ack)
    text = shown(server)
    assert "bystander" in text
    for evil in ("\x1b]0;", "\x1b[2J", "\x1b[31m", "\u202e", "\x07", "\x00"):
        assert evil not in text
    with LiveReader(server.address) as reader:
        assert reader.overview().written >= 2


@pytest.mark.attack("lies about sizes")
def test_long_names_count_towards_the_bound(server, bystander, raw):
    for i in range(100):
        raw.send_batch(pack([record(f"{i}" + "x" * MIB)]))
    while raw.receive_a(wire.Ack).number < 100:
        pass
    assert server.history.nbytes <= server.history.bound
    assert sum(server.history.evicted.values()) > 30


# -- questions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        wire.Query(1, "nothing"),
        wire.Query(1, "load", {"name": 5, "seq": "x", "rank": None}),
        wire.Query(1, "load", {}),
        wire.Query((1 << 64) - 1, "\x1b[2J" * 1000),
    ],
)
def test_unknown_questions_get_an_error(server, bystander, query):
    with RawClient(server.address) as viewer:
        viewer.connect("viewer")
        viewer.send_message(wire.QUERY, query)
        reply = viewer.receive_a(wire.Reply)
        assert reply.id == query.id
        assert reply.error
    assert not server.rejected


def test_clients_with_reused_file_descriptors(server, bystander):
    """A new client must not be mistaken for one that has left."""
    for number in range(60):
        with RawClient(server.address) as client:
            client.connect()
            client.send_batch(pack([record("brief", number)]))
            assert client.receive_a(wire.Ack).number == 1
    assert [r.value for r in server.history.records("brief")] == list(range(60))
    assert not server.rejected


def test_keeps_the_records_of_a_rejected_client(server, bystander, raw):
    raw.send_batch(pack([record("before")]))
    raw.receive_a(wire.Ack)
    raw.send(b"?")
    raw.receive_a(wire.Refusal)
    assert "before" in server.history.names()


@pytest.mark.attack("control characters for the terminal")
def test_top_sanitizes_names(server, raw, monkeypatch):
    raw.send_batch(
        pack([record("a\x1b[2Jb\x1b]0;owned\x07\r\nc\x00\x9b31m", STRANGE["escape sequences"])])
    )
    raw.receive_a(wire.Ack)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for option in ("--once", "--json"):
        code, out, err = type_in("top", str(server.address), option)
        assert code == 0, err
        assert "owned" in out
        for evil in ("\x1b[2J", "\x1b]", "\x07", "\x00", "\x9b", "\r"):
            assert evil not in out
