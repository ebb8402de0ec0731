"""Thousands of mutated messages to a server, over real sockets."""

from __future__ import annotations

import logging
import random

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensortap.api import session as live
from tensortap.live import answers, keys
from tensortap.live import messages as wire
from tests.live.server.clients import RawClient, assert_serves
from tests.live.wire.test_messages import BLOCK, COLUMNS, HEADERS, deep, mutate, some_records
from tests.processes import wait_for
from tests.proof import kind_of

seeds = st.integers(0, (1 << 64) - 1)
BATCH = 50  # messages per example


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        server = live.start("127.0.0.1", 0, "16MB")
        yield server
        server.close()


@pytest.fixture(autouse=True)
def own_key(served, monkeypatch):
    monkeypatch.setenv("TENSORTAP_KEY", keys.key_text(served.key))


def message(rng, numbers) -> list[bytes]:
    """Return the frames of a message, often malformed."""
    body = wire.encode_records(rng.choice([some_records(), [deep(50)], []]), None)
    if rng.random() < 0.5:
        body = mutate(rng, body)
    number = next(numbers)
    externals = tuple(
        wire.External(
            rng.choice([0, 0, 1]), rng.choice([0, 7, 1 << 40]), rng.choice([0, 9, 1 << 45])
        )
        for _ in range(rng.choice([0, 0, 1, 3]))
    )
    length = rng.choice([len(body)] * 5 + [0, len(body) + 1, 1 << 40])
    headers = [
        *HEADERS,
        *[(wire.RECORDS, wire.Batch(number, length, rng.choice([0, 600, 1 << 50]), externals))] * 8,
        (
            wire.CHUNK,
            wire.Chunk(number - rng.randint(0, 3), rng.randint(-1, 2), rng.choice([0, 5])),
        ),
        (wire.QUERY, wire.Query(number, rng.choice(["overview", "names", "heads", "load"]))),
    ]
    kind, header = rng.choice(headers)
    if rng.random() < 0.2:
        body = mutate(rng, BLOCK) if rng.random() < 0.5 else BLOCK
        rows, columns = rng.choice([3, 3, 3, 2, 1 << 62]), COLUMNS[: rng.choice([2, 2, 1])]
        kind, header = wire.RECORDS, wire.Batch(number, len(body), 9, columns=columns, rows=rows)
    frame = msgspec.msgpack.encode(header)
    if rng.random() < 0.5:
        frame = mutate(rng, frame)
    frames = [kind, frame, body]
    match rng.randrange(12):
        case 0:
            rng.shuffle(frames)
        case 1:
            frames = frames[: rng.randint(1, 3)]
        case 2:
            frames += [rng.randbytes(rng.randint(0, 30))] * rng.randint(1, 4)
        case 3:
            frames = [rng.randbytes(rng.randint(0, 30)) for _ in range(rng.randint(1, 4))]
        case 4:
            frames[0] = rng.randbytes(1)
    return frames


@pytest.mark.slow
@pytest.mark.attack("garbage on the wire")
def test_mutated_messages(served, caplog, monkeypatch, request, record_property):
    """The server survives, its memory stays bounded, and a real client still delivers."""
    examples = 40 if kind_of(request.config) is None else 200
    record_property("tried", examples * BATCH)
    caplog.set_level(logging.CRITICAL, "tensortap")
    process = psutil.Process()
    assert_serves(served)
    before = process.memory_info().rss
    handled = []
    take = served._handle

    def counting(route, frames):
        handled.append(len(frames))
        take(route, frames)

    monkeypatch.setattr(served, "_handle", counting)

    @given(seeds.map(random.Random), st.sampled_from([BATCH, 5]))
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    def attack(rng, together):
        """Send messages before the handshake, or after it until the server disconnects."""
        for _ in range(BATCH // together):
            with RawClient(served.address, key=served.key) as client:
                if together < BATCH:
                    client.connect()
                handled.clear()
                for _ in range(together):
                    client.send(*message(rng, client.numbers))
                wait_for(lambda n=together: len(handled) >= n, "a message was not processed")
        counts.append(BATCH)
        assert served.alive
        assert served.history.nbytes <= served.history.bound

    counts = []
    attack()
    assert sum(counts) >= examples * BATCH
    assert process.memory_info().rss - before < 256 << 20
    answers.overview(served)  # everything that was stored can be shown
    assert_serves(served, name="afterwards")
    assert served.rejected["invalid message"] > 2.5 * examples
    assert served.rejected["error"] == 0, "a malformed message raised an unexpected error"
    assert len(served.history.names()) > 2, "no message was valid: the mutations are too coarse"
