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
from tensortap.errors import NotFound
from tensortap.readers.live import LiveReader
from tensortap.server import answers
from tensortap.wire import keys
from tensortap.wire import messages as wire
from tensortap.wire.address import Address
from tensortap.wire.channel import Channel, ConnectionState
from tests.server.clients import Proxy, RawClient, RealClient, assert_serves, wait_for

SOURCE = str(Path(__file__).parents[2] / "src")


def refusal_of(address, role="source", seconds=5.0) -> str:
    """Return why a channel is rejected."""
    context = zmq.Context()
    channel = Channel(address, role, context)
    try:
        wait_for(lambda: channel.poll(0.02) is None or channel.refusal, seconds)
        assert channel.state is not ConnectionState.OPEN
        return channel.refusal
    finally:
        channel.close()
        context.destroy(linger=0)


def test_accepts_a_client_with_the_key(server, bystander):
    with RawClient(server.address) as client:
        assert client.connect().largest == server.history.bound
    assert not server.rejected


@pytest.mark.attack("no key")
def test_client_without_a_key_says_how_to_get_one(server, bystander, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "the first tap.serve() creates one, or set TENSORTAP_KEY" in refusal_of(server.address)
    with pytest.raises(NotFound, match="no key yet"):
        LiveReader(server.address, 0.5)


@pytest.mark.attack("wrong key")
def test_client_reports_another_key(server, bystander, monkeypatch):
    monkeypatch.setenv("TENSORTAP_KEY", keys.key_text(b"\1" * 32))
    assert "has another key: set TENSORTAP_KEY to its key" in refusal_of(server.address)


@pytest.mark.attack("wrong key")
def test_rejects_and_counts_a_wrong_proof(server, bystander):
    with RawClient(server.address, key=b"\1" * 32) as client:
        client.send_message(wire.PROOF, client.proof(client.hello()))
        assert "wrong key: set TENSORTAP_KEY" in client.receive_a(wire.Refusal).reason
        client.send_batch()  # is invalid, and is not answered
        wait_for(lambda: server.rejected["invalid message"] == 1)
        assert client.receive(0.1) is None
    assert server.rejected["wrong key"] == 1
    assert answers.overview(server).rejected == {"wrong key": 1, "invalid message": 1}


@pytest.mark.attack("replayed proof")
def test_rejects_a_proof_of_another_connection(server, bystander):
    with RawClient(server.address) as one, RawClient(server.address) as other:
        one.hello()
        proof = other.proof(other.hello())
        one.send_message(wire.PROOF, proof)
        assert one.receive_a(wire.Refusal)
        other.send_message(wire.PROOF, proof)
        assert other.receive_a(wire.Welcome)
        other.send_message(wire.GOODBYE, wire.Goodbye())
        with RawClient(server.address) as third:  # nor after its own connection was closed
            third.hello()
            third.send_message(wire.PROOF, proof)
            assert third.receive_a(wire.Refusal)
    assert server.rejected["wrong key"] == 2


@pytest.mark.attack("replayed proof")
def test_rejects_the_servers_own_proof(server, bystander):
    with RawClient(server.address) as client:
        challenge = client.hello()
        client.send_message(wire.PROOF, wire.Proof(challenge.mac, wire.Client(b"mirror")))
        assert client.receive_a(wire.Refusal)
    assert server.rejected["wrong key"] == 1


@pytest.mark.attack("replayed proof")
def test_challenge_can_be_answered_once(server, bystander):
    with RawClient(server.address, key=b"\1" * 32) as client:
        challenge = client.hello()
        client.send_message(wire.PROOF, client.proof(challenge))
        assert client.receive_a(wire.Refusal)
        client.key = keys.find_key()
        client.send_message(wire.PROOF, client.proof(challenge))
        wait_for(lambda: server.rejected["invalid message"] == 1)
        assert client.receive(0.2) is None


@pytest.mark.parametrize(("mode", "words"), [(0o644, "chmod 600"), (0o640, "chmod 600")])
@pytest.mark.attack("key file of somebody else")
def test_rejects_a_key_file_that_others_can_read(server, mode, words):
    path = keys.key_path()
    path.chmod(mode)
    assert words in refusal_of(server.address)
    with pytest.raises(keys.KeyFileError, match=words):
        keys.make_key()
    path.chmod(0o600)
    assert_serves(server)


@pytest.mark.attack("key file of somebody else")
def test_rejects_a_key_file_of_another_user(server, monkeypatch):
    if os.getuid() == 0:
        os.chown(keys.key_path(), 65534, 65534)
    else:
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert "belongs to another user" in refusal_of(server.address)


OTHER_USER = """
    import os, sys
    sys.path.insert(0, {source!r})
    import tensortap as tap, tensortap.sinks.live, tensortap.pipeline.queue
    import zmq, time, numpy, zmq.utils.monitor, zmq.utils.z85
    tap.open, tap.errors
    from tensortap.wire import keys, messages as wire
    if os.getuid() == 0:  # after the imports: this user may not read them
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        assert os.getuid() == 65534
    {key}
    for i in range(10):
        tap.catch(numpy.zeros(100_000), "other")
        time.sleep(0.02)
    ticket = tap.catch(1, "other")
    print("arrived", ticket.wait(0.5))
    print("sessions", tap.receipt().sessions)
    try:
        tap.open({address!r}, 1.0)
        print("reads")
    except tap.errors.NotFound as error:
        print("rejected:", error)
    # without tensortap's client
    socket = zmq.Context().socket(zmq.DEALER); socket.linger = 0
    socket.connect({endpoint!r})
    socket.send_multipart(wire.message(wire.QUERY, wire.Query(1, "overview")))
    print("query", socket.recv_multipart()[0] if socket.poll(2000) else None)
"""


@pytest.mark.attack("another user of the machine")
def test_other_users_of_the_machine_are_rejected(server, bystander, tmp_path):
    home = tmp_path / "home"  # only we can read it
    home.mkdir(mode=0o700)
    env = {k: v for k, v in os.environ.items() if k not in ("XDG_CONFIG_HOME", "HOME")}
    if os.getuid() == 0:
        # our own folder, which other users cannot read
        env["XDG_CONFIG_HOME"] = os.environ["XDG_CONFIG_HOME"]
        keys.key_path().parent.parent.chmod(0o700)
    env |= {"HOME": str(home), "TENSORTAP_SERVER": str(server.address)}
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
        assert lines[3] == f"query {wire.REFUSED!r}"
        assert keys.key_text(keys.find_key()) not in out + err
    assert server.history.names() == ["bystander"]
    assert server.rejected["invalid message"] == 2


@pytest.mark.parametrize("protocol", [wire.PROTOCOL + 1, wire.PROTOCOL - 1])
def test_rejects_and_counts_another_protocol_version(server, bystander, protocol):
    with RawClient(server.address) as client:
        refusal = client.hello(protocol=protocol, version="9.8.7 of a monkey")
    assert (refusal.protocol, refusal.version) == (wire.PROTOCOL, __version__)
    assert f"tensortap 9.8.7 of a monkey (protocol {protocol})" in refusal.reason
    assert f"{__version__} (protocol {wire.PROTOCOL})" in refusal.reason
    assert server.rejected == {"protocol version": 1}


@pytest.mark.parametrize(("theirs", "side"), [(7, "this"), (0, "the other")])
@pytest.mark.parametrize("word", ["refusal", "challenge"])
def test_client_reports_another_version_of_the_server(theirs, side, word):
    """The message names both versions and which side to upgrade."""
    key = keys.make_key()

    def reply(route, hello):
        mac = keys.proof(key, "server", hello.nonce, bytes(16))
        words = {
            "refusal": (wire.REFUSED, wire.Refusal("upgrade no side", theirs, "9.8.7")),
            "challenge": (wire.CHALLENGE, wire.Challenge(theirs, "9.8.7", bytes(16), mac)),
        }
        return [wire.message(*words[word])]

    with impostor(reply) as (address, _):
        said = refusal_of(address)
    assert f"tensortap 9.8.7 (protocol {theirs})" in said
    assert f"this one {__version__} (protocol {wire.PROTOCOL})" in said
    assert said.endswith(f": upgrade {side} side")


@contextlib.contextmanager
def impostor(reply):
    """Listen without the key; yield the address and all frames that were received."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    heard: list[bytes] = []
    done = threading.Event()

    def run():
        while not done.is_set():
            if not router.poll(20):
                continue
            route, *frames = router.recv_multipart()
            heard.extend(frames)
            if frames[0] == wire.HELLO:
                for answer in reply(route, wire.read_header(*frames[:2])):
                    router.send_multipart([route, *answer])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Address("127.0.0.1", port), heard
    finally:
        done.set()
        thread.join()
        context.destroy(linger=0)


def mac_of(route, hello, key=bytes(32)):
    return keys.proof(key, "server", hello.nonce, bytes(16))


IMPOSTORS = {
    "welcomes at once": lambda r, h: [wire.message(wire.WELCOME, wire.Welcome(1 << 30, 1 << 40))],
    "has another key": lambda r, h: [
        wire.message(
            wire.CHALLENGE, wire.Challenge(wire.PROTOCOL, "0.1.0", bytes(16), mac_of(r, h))
        ),
        wire.message(wire.WELCOME, wire.Welcome(1 << 30, 1 << 40)),
    ],
    "mirrors the nonce": lambda r, h: [
        wire.message(wire.CHALLENGE, wire.Challenge(wire.PROTOCOL, "0.1.0", h.nonce, h.nonce * 2)),
        wire.message(wire.WELCOME, wire.Welcome(1 << 30, 1 << 40)),
    ],
    "acknowledges": lambda r, h: [
        wire.message(wire.ACK, wire.Ack(0, 1 << 40)),
        wire.message(wire.WELCOME, wire.Welcome(1 << 30, 1 << 40)),
    ],
    "sends garbage": lambda r, h: [[b"\xff" * 100], [b"W", b"\xc1"], [b""], [b"W"]],
}


@pytest.mark.parametrize("manner", IMPOSTORS)
@pytest.mark.attack("impostor of a session")
def test_impostor_receives_neither_tensors_nor_the_key(manner):
    key = keys.make_key()
    with impostor(IMPOSTORS[manner]) as (address, heard):
        real = RealClient(address)
        assert not real.deliver("secret", timeout=0.5)
        assert real.state.startswith("none: ")
        real.close()
    assert heard
    assert set(heard[::2]) == {wire.HELLO}
    everything = b"".join(heard)
    assert b"secret" not in everything
    assert b"\x07" * 16 not in everything
    assert key not in everything
    assert keys.key_text(key).encode() not in everything


@pytest.mark.attack("impostor of a session")
def test_text_of_an_impostor_is_sanitized_in_the_log(caplog):
    keys.make_key()
    evil = "\x1b]0;owned\x07\x1b[2J" + "x" * 10_000
    refuse = lambda r, h: [wire.message(wire.REFUSED, wire.Refusal(evil))]
    with impostor(refuse) as (address, _):
        real = RealClient(address)
        wait_for(lambda: "owned" in real.state)
        said = real.state
        wait_for(lambda: "no live session" in caplog.text)
        real.close()
    for text in (said, *caplog.messages):
        assert text.isprintable()
        assert len(text) < 500
    with impostor(
        lambda r, h: [wire.message(wire.CHALLENGE, wire.Challenge(9, evil, b"", b""))]
    ) as (
        address,
        _,
    ):
        said = refusal_of(address)
        assert said.isprintable()
        assert len(said) < 500


@pytest.mark.attack("listening on the wire")
def test_key_is_never_sent(server):
    proxy = Proxy("127.0.0.1", server.address.port)
    real = RealClient(Address("127.0.0.1", proxy.port), arena=False)
    assert real.deliver("seen")
    real.close()
    proxy.close()
    key = keys.find_key()
    assert b"seen" in proxy.seen  # not encrypted: only root can listen on loopback
    assert key not in proxy.seen
    assert keys.key_text(key).encode() not in proxy.seen
    secret = keys.curve_pair(key, "client")[1]
    assert secret not in proxy.seen


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


@pytest.mark.attack("listening on the wire")
def test_encrypts_beyond_loopback(public):
    proxy = Proxy("127.0.0.1", public.address.port)
    real = RealClient(Address("127.0.0.1", proxy.port), arena=False)
    assert real.deliver("secret")
    real.close()
    proxy.close()
    assert public.history.names() == ["secret"]
    assert len(proxy.seen) > 100_000
    for secret in (b"secret", b"\x07" * 8, b"numpy", keys.find_key()):
        assert secret not in proxy.seen


def test_server_on_all_interfaces_is_found_under_any_address(public):
    hosts = ["127.0.0.1", socket.gethostname(), own_address() or "127.0.0.1"]
    for number, host in enumerate(hosts):
        real = RealClient(Address(host, public.address.port))
        assert real.deliver(f"from {number}"), real.state
        assert "shared memory" in real.state
        real.close()
    assert public.history.names() == ["from 0", "from 1", "from 2"]


@pytest.mark.attack("wrong key")
def test_rejects_and_counts_another_curve_key(public):
    address = Address("127.0.0.1", public.address.port)
    with RawClient(address, curve=b"\1" * 32) as client:
        client.send_message(wire.HELLO, wire.Hello(wire.PROTOCOL, __version__, "source", bytes(16)))
        # without the server's key the handshake of CURVE fails
        wait_for(lambda: sum(public.rejected.values()) >= 1)
    with RawClient(address) as client:
        context = client.context
        socket_ = context.socket(zmq.DEALER)
        socket_.linger = 0
        socket_.curve_serverkey, _ = keys.curve_pair(keys.find_key(), "server")
        socket_.curve_publickey, socket_.curve_secretkey = zmq.curve_keypair()
        socket_.connect(address.endpoint)
        socket_.send_multipart(wire.message(wire.QUERY, wire.Query(1, "overview")))
        wait_for(lambda: public.rejected["wrong key"] >= 1)
        assert not socket_.poll(100)
    assert_serves_at(public)


def assert_serves_at(public):
    real = RealClient(Address("127.0.0.1", public.address.port))
    assert real.deliver()
    real.close()


@pytest.mark.attack("plain text to an encrypted session")
def test_rejects_and_counts_plaintext_to_an_encrypted_server(public):
    with RawClient(Address("127.0.0.1", public.address.port)) as client:
        client.send_message(wire.HELLO, wire.Hello(wire.PROTOCOL, __version__, "source", bytes(16)))
        wait_for(lambda: public.rejected["failed handshake"] >= 1)
        assert client.receive(0.2) is None
    assert_serves_at(public)


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
        print(tap.catch([1, 2], "far").wait(10))
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
