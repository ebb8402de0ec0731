"""The handshake: real sockets, real users."""

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
import zmq

from tensortap._version import __version__
from tensortap.api import session as live
from tensortap.core.errors import NotFound
from tensortap.live import answers, keys
from tensortap.live import messages as wire
from tensortap.live.address import Address
from tensortap.live.channel import Channel, ConnectionState
from tensortap.live.reader import LiveReader
from tests.live.server.clients import Proxy, RawClient, RealClient, assert_serves
from tests.processes import wait_for

SOURCE = str(Path(__file__).parents[3] / "src")


def refusal_of(address, key=None) -> str:
    """Return why a channel is rejected."""
    channel = Channel(address, wire.hello("source", wire.Client(bytes(16))), key)
    try:
        wait_for(lambda: channel.poll(0.02) is None or channel.state is not ConnectionState.SEEKING)
        assert channel.state is ConnectionState.ABSENT
        return channel.refusal
    finally:
        channel.end(linger=0)


@pytest.mark.slow
@pytest.mark.attack("no key")
def test_client_without_a_key_says_how_to_get_one(server, bystander, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "the first tap.serve() here creates one" in (said := refusal_of(server.address))
    assert "session on another machine, copy its key file or set TENSORTAP_KEY" in said
    with pytest.raises(NotFound, match="no key on this machine"):
        LiveReader(server.address, 0.5)


@pytest.mark.attack("wrong key")
def test_client_reports_another_key(server, bystander, monkeypatch):
    monkeypatch.setenv("TENSORTAP_KEY", keys.key_text(b"\1" * 32))
    said = refusal_of(server.address)
    assert "rejects our key" in said
    assert "set TENSORTAP_KEY to its key" in said


@pytest.mark.slow
def test_client_does_not_blame_the_key_while_the_server_is_silent(monkeypatch):
    keys.make_key()
    monkeypatch.setattr("tensortap.live.channel._TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(*silent.getsockname())
        reasons = [refusal_of(address)]
        assert reasons[0].startswith("the server did not answer within")

        def connected():
            with pytest.raises(NotFound) as caught:
                LiveReader(address, 0.2)
            reasons.append(str(caught.value))
            return reasons[-1].endswith("the server has not answered yet")

        wait_for(connected)
    assert not any("key" in reason for reason in reasons)


@pytest.mark.slow
@pytest.mark.attack("wrong key")
def test_rejects_and_counts_a_wrong_key(server, bystander):
    strangers = {"key": b"\1" * 32}, {"pair": zmq.curve_keypair()}  # the second knows our key
    for options in strangers:
        before = server.rejected["wrong key"]
        with RawClient(server.address, **options) as client:
            client.send_message(wire.QUERY, wire.Query(1, "overview"))
            wait_for(lambda n=before: server.rejected["wrong key"] > n)
            assert client.receive(0) is None
    # libzmq tries again, and a client that closes meanwhile has not finished its handshake
    shown = answers.overview(server).rejected
    assert set(shown) <= {"wrong key", "failed handshake"}
    assert shown["wrong key"] >= 2


@pytest.mark.attack("plain text to an encrypted session")
def test_rejects_and_counts_plaintext(server, bystander):
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(server.address.endpoint)
    plain.send_multipart(wire.message(wire.QUERY, wire.Query(1, "overview")))
    wait_for(lambda: server.rejected["failed handshake"] >= 1)
    assert not plain.poll(100)
    context.destroy(linger=0)


@pytest.mark.attack("key file of somebody else")
def test_rejects_a_key_file_of_another_user(server, monkeypatch):
    if os.getuid() == 0:
        os.chown(keys.key_path(), 65534, 65534)
    else:
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert "belongs to another user" in refusal_of(server.address)


OTHER_USER = """
    import faulthandler, os, pkgutil, sys, time
    sys.path.insert(0, {source!r})
    import numpy, zmq, zmq.utils.monitor, zmq.utils.z85
    import tensortap as tap, tensortap.live
    from tensortap.live import keys, messages as wire
    # import everything first: this user may not be able to read the clone, or Python
    for module in pkgutil.iter_modules(tap.live.__path__):
        __import__("tensortap.live." + module.name)
    tap.catch(numpy.zeros(9), "nowhere"), tap.catch(1, "nowhere")
    try:
        tap.open("127.0.0.1:1", 0.1)
    except tap.core.errors.NotFound:
        pass
    child = os.fork()  # it has its own connections
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    faulthandler.dump_traceback_later(50, exit=True)  # nothing is left behind
    os.environ["TENSORTAP_SERVER"] = {address!r}
    if os.getuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        assert os.getuid() == 65534
    {key}
    for i in range(10):
        tap.catch(numpy.zeros(100_000), "other")
    ticket = tap.catch(1, "other")
    while not (ticket.done and "none: " in str(tap.receipt().sessions)):
        time.sleep(0.01)
    print("arrived", ticket.wait(0))
    print("sessions", tap.receipt().sessions)
    try:
        tap.open({address!r}, 1.0)
        print("reads")
    except tap.core.errors.NotFound as error:
        print("rejected:", error)
    # without tensortap's client
    socket = zmq.Context().socket(zmq.DEALER); socket.linger = 0
    socket.connect({endpoint!r})
    socket.send_multipart(wire.message(wire.QUERY, wire.Query(1, "overview")))
    print("query", socket.recv_multipart()[0] if socket.poll(500) else None)
"""


@pytest.mark.attack("another user of the machine")
@pytest.mark.slow
def test_other_users_of_the_machine_are_rejected(server, bystander, tmp_path):
    home = tmp_path / "home"  # only we can read it
    home.mkdir(mode=0o700)
    env = {k: v for k, v in os.environ.items() if k not in ("XDG_CONFIG_HOME", "HOME")}
    if os.getuid() == 0:
        # our own folder, which other users cannot read
        env["XDG_CONFIG_HOME"] = os.environ["XDG_CONFIG_HOME"]
        keys.key_path().parent.parent.chmod(0o700)
    env |= {"HOME": str(home), "TENSORTAP_SERVER": "127.0.0.1:1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = []
    for key in ("", "os.environ['TENSORTAP_KEY'] = keys.key_text(bytes(32))"):
        code = textwrap.dedent(OTHER_USER).format(
            source=SOURCE, key=key, address=str(server.address), endpoint=server.address.endpoint
        )
        started.append(subprocess.Popen([sys.executable, "-c", code], env=env, **pipes))
    for process in started:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        lines = out.splitlines()
        assert lines[0] == "arrived False"
        assert "none: " in lines[1]
        assert lines[2].startswith("rejected: no live session at")
        assert lines[3] == "query None"
        assert keys.key_text(keys.find_key()) not in out + err
    assert server.history.names() == ["bystander"]
    wait_for(lambda: set(server.rejected) == {"failed handshake", "wrong key"})


@pytest.mark.parametrize("protocol", [wire.PROTOCOL + 1, wire.PROTOCOL - 1])
def test_rejects_and_counts_another_protocol_version(server, bystander, protocol):
    with RawClient(server.address) as client:
        refusal = client.hello(protocol=protocol, version="9.8.7 of a monkey")
    assert (refusal.protocol, refusal.version) == (wire.PROTOCOL, __version__)
    assert f"tensortap 9.8.7 of a monkey (protocol {protocol})" in refusal.reason
    assert f"{__version__} (protocol {wire.PROTOCOL})" in refusal.reason
    assert server.rejected == {"protocol version": 1}


@contextlib.contextmanager
def impostor(reply, key=None):
    """Listen with another key, or in plain text; yield the address and all frames received."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    if key is not None:
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys.curve_pair(key, "server")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    heard: list[bytes] = []
    done = threading.Event()

    def run():
        while not done.is_set():
            if not router.poll(20):
                continue
            route, *frames = router.recv_multipart()
            heard.extend(frames)
            for answer in reply:
                router.send_multipart([route, *answer])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Address("127.0.0.1", port), heard
    finally:
        done.set()
        thread.join()
        context.destroy(linger=0)


@pytest.mark.parametrize(("theirs", "side"), [(7, "this"), (0, "the other")])
def test_client_reports_another_version_of_the_server(theirs, side):
    """The message names both versions and which side to upgrade."""
    refusal = wire.message(wire.REFUSED, wire.Refusal("upgrade no side", theirs, "9.8.7"))
    with impostor([refusal], keys.make_key()) as (address, _):
        said = refusal_of(address)
    assert f"tensortap 9.8.7 (protocol {theirs})" in said
    assert f"this one {__version__} (protocol {wire.PROTOCOL})" in said
    assert said.endswith(f": upgrade {side} side")


@pytest.mark.parametrize(
    "reply", [[wire.message(wire.ACK, wire.Ack(0, 1 << 40))], [[b"\xff" * 100]], [[b"W", b"\xc1"]]]
)
@pytest.mark.attack("impostor of a session")
def test_client_rejects_other_messages_than_a_welcome(reply):
    with impostor(reply, keys.make_key()) as (address, _):
        assert refusal_of(address)


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["plain text", "another key"])
@pytest.mark.attack("impostor of a session")
def test_impostor_receives_nothing(key):
    keys.make_key()
    welcome = wire.message(wire.WELCOME, wire.Welcome(1 << 30, 1 << 40))
    with impostor([welcome], key) as (address, heard):
        real = RealClient(address)
        assert not real.deliver("secret", timeout=0.5)
        wait_for(lambda: "rejects our key" in real.state)
        real.close()
    assert heard == []


@pytest.mark.attack("impostor of a session")
def test_text_of_a_server_is_sanitized_in_the_log(caplog):
    evil = "\x1b]0;owned\x07\x1b[2J" + "x" * 10_000
    refusals = wire.Refusal(evil), wire.Refusal("", 9, evil)
    for refusal, word in zip(refusals, ("owned", "upgrade"), strict=True):
        reply = [wire.message(wire.REFUSED, refusal)]
        with impostor(reply, keys.make_key()) as (address, _):
            real = RealClient(address)
            wait_for(lambda: word in real.state)  # noqa: B023
            said = real.state
            wait_for(lambda: word in caplog.text)  # noqa: B023
            real.close()
        for text in (said, *caplog.messages):
            assert text.isprintable()
            assert len(text) < 500


@pytest.mark.attack("listening on the wire")
def test_relay_reads_nothing_on_loopback(server):
    proxy = Proxy(server.address.port)
    real = RealClient(Address("127.0.0.1", proxy.port), arena=False)
    assert real.deliver("secret")
    real.close()
    proxy.close()
    key = keys.find_key()
    assert server.history.names() == ["secret"]
    assert len(proxy.seen) > 100_000
    pairs = keys.curve_pair(key, "client"), keys.curve_pair(key, "server")
    secrets = b"secret", b"\x07" * 8, b"numpy", key, keys.key_text(key).encode(), *sum(pairs, ())
    for secret in secrets:
        assert secret not in proxy.seen


@pytest.mark.attack("replayed connection")
def test_recorded_connection_cannot_be_replayed(server):
    proxy = Proxy(server.address.port)
    real = RealClient(Address("127.0.0.1", proxy.port), arena=False)
    assert real.deliver("once")
    real.close()
    proxy.close()
    with socket.create_connection(tuple(server.address), 60) as replay:
        replay.settimeout(60)
        with contextlib.suppress(OSError):
            replay.sendall(proxy.sent)
            while replay.recv(1 << 16):
                pass  # until the server disconnects
    wait_for(lambda: server.rejected)
    assert [client.records for client in server.clients.values()] == [1]
    assert_serves(server)


# -- beyond loopback ---------------------------------------------------------------------


@pytest.fixture
def public():
    """A server on all interfaces."""
    server = live.start("0.0.0.0", 0, "64MB")
    yield server
    server.close()


def own_address() -> str | None:
    """Return an address of this machine that is not a loopback one."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    return None


@pytest.mark.slow
def test_server_on_all_interfaces_is_found_under_any_address(public):
    hosts = ["127.0.0.1", socket.gethostname(), own_address() or "127.0.0.1"]
    for number, host in enumerate(hosts):
        real = RealClient(Address(host, public.address.port))
        assert real.deliver(f"from {number}"), real.state
        assert "shared memory" in real.state
        real.close()
    assert public.history.names() == ["from 0", "from 1", "from 2"]


@pytest.mark.slow
def test_greeting_has_what_the_training_side_needs(public, monkeypatch):
    said = live.greeting(public).splitlines()
    exports = dict(
        line.strip().removeprefix("export ").split("=", 1) for line in said if "export" in line
    )
    assert list(exports) == ["TENSORTAP_SERVER", "TENSORTAP_KEY"]
    assert exports["TENSORTAP_SERVER"] == f"{socket.gethostname()}:{public.address.port}"
    # these are enough on a machine without either
    code = """
        import tensortap as tap
        print(tap.catch([1, 2], "far").wait(60))
    """
    env = {k: v for k, v in os.environ.items() if k not in ("XDG_CONFIG_HOME", "HOME")}
    env |= {**exports, "HOME": "/nonexistent", "PYTHONPATH": SOURCE}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "True\n", done.stderr
    assert public.history.names() == ["far"]


def test_greeting_on_loopback_has_no_key(server):
    said = live.greeting(server)
    assert keys.key_text(keys.find_key()) not in said
    assert "export" not in said
