"""Connections without the key: what they may hold, and for how long."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from tensortap.api import session as live
from tensortap.live import handshake
from tensortap.live import messages as wire
from tests.live.server.clients import assert_serves
from tests.processes import wait_for

MIB = 1 << 20
SOURCE = str(Path(__file__).parents[3])
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"%s" + bytes(32)
CURVE, PLAIN = (GREETING % name.ljust(20, b"\0") for name in (b"CURVE", b"NULL"))
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
SIZE = wire.LARGEST_FRAME.to_bytes(8, "big")
BOMBS = {
    "a large command": CURVE + b"\x06" + SIZE,
    "a large message": CURVE + b"\x02" + SIZE,
    "a multipart message": PLAIN + bytes([4, len(READY)]) + READY + b"\x03" + SIZE,
    "nothing known": b"\xff" * 100,
}


def rss() -> int:
    return psutil.Process().memory_info().rss


def send_each(connections: list[socket.socket], nbytes: int) -> None:
    """Send so many bytes over each connection that is not closed before."""
    left, payload = dict.fromkeys(connections, nbytes), bytes(64 << 10)
    while left:
        for connection in list(left):
            try:
                left[connection] -= connection.send(payload[: left[connection]])
            except BlockingIOError:
                continue
            except OSError:
                left[connection] = 0
            if not left[connection]:
                del left[connection]


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.attack("endless and silent connections")
def test_strangers_hold_little_memory(server, bystander, bomb):
    """A hundred connections send as much as they can, also before the server looks at them."""
    before = rss()
    connections = [socket.create_connection(tuple(server.address), 60) for _ in range(100)]
    for connection in connections:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.sendall(BOMBS[bomb])
    send_each(connections, wire.LARGEST_FRAME - 1)
    highest = rss() - before
    sent, payload = 0, bytes(64 << 10)

    def rejected():
        nonlocal sent, highest
        for connection in connections:
            with contextlib.suppress(OSError):  # disconnected, or the buffer is full
                sent += connection.send(payload)
        highest = max(highest, rss() - before)
        return server.rejected["failed handshake"] >= 100

    # a failed handshake for each: both counts go up for those that sent too much
    wait_for(rejected, "some were not disconnected")
    for connection in connections:
        connection.settimeout(60)
        with connection, pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(payload * 256)  # more than all buffers can take
    # a frame of each, and what the server prepares for values
    assert highest < 160 * MIB, f"{highest / MIB:.0f} MiB for {sent / MIB:.0f} MiB"
    assert_serves(server)


@pytest.mark.attack("endless and silent connections")
def test_disconnects_silent_connections_after_a_timeout(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT", 500)
    server = live.start("127.0.0.1", 0, "64MB")
    silent = [socket.create_connection(tuple(server.address), 60) for _ in range(40)]
    for connection in silent[::2]:
        connection.sendall(CURVE[:50])
    for connection in silent:
        with connection:
            while connection.recv(4096):
                pass  # until the server closes
    wait_for(lambda: server.rejected["failed handshake"] == 40)
    assert_serves(server)
    server.close()


@pytest.mark.attack("endless and silent connections")
def test_many_silent_connections_take_few_descriptors(server, bystander, monkeypatch):
    """They would be descriptors of a training program that serves its own session."""
    monkeypatch.setattr("tensortap.live.handshake._MOST_PENDING", 50)
    before = len(os.listdir("/proc/self/fd"))
    silent = [socket.create_connection(tuple(server.address), 60) for _ in range(200)]
    wait_for(lambda: server.rejected["too many connections"] == 150)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) - before - len(silent) <= 50)
    assert_serves(server)
    for connection in silent:
        connection.close()


FEW_DESCRIPTORS = """
    import resource, sys, time
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    others = [open("/dev/null") for _ in range(128)]  # the rest is not enough for pending ones
    from tensortap.api import session as live
    from tensortap.live import handshake
    handshake.HANDSHAKE_TIMEOUT = 1_000_000  # only connections without room are closed
    server = live.start("127.0.0.1", 0, "64MB")
    print(server.address.port, flush=True)
    while not server.rejected["too many connections"]:
        time.sleep(0.01)
    print("full", flush=True)
    sys.stdin.readline()
    print(server.history.names(), server.alive, flush=True)
"""


@pytest.mark.slow
@pytest.mark.attack("endless and silent connections")
def test_serves_at_the_limit_of_descriptors():
    """400 idle connections to a server with 256 descriptors; they come back when dropped."""
    from tensortap.live.address import Address
    from tests.live.server.clients import RealClient

    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FEW_DESCRIPTORS)],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}/src"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    address = Address("127.0.0.1", int(process.stdout.readline()))
    done = threading.Event()

    def idle():
        held = []
        while not done.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(tuple(address), 0.2))
            if len(held) > 400:
                held.pop(0).close()
            done.wait(0.005)
        for connection in held:
            connection.close()

    attacker = threading.Thread(target=idle)
    attacker.start()
    try:
        assert process.stdout.readline() == "full\n"
        client = RealClient(address)
        wait_for(lambda: client.deliver("late", timeout=1), lambda: client.state)
        client.close()
    finally:
        done.set()
        attacker.join()
        out, _ = process.communicate("\n", timeout=60)
    assert out == "['late'] True\n"
