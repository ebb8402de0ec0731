"""Who is let in, and what becomes of the others: real sockets, real users."""

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
from tests.server.clients import Good, Proxy, Raw, assert_serves, wait_for

SOURCE = str(Path(__file__).parents[2] / "src")


def refusal_of(address, role="source", seconds=5.0) -> str:
    """Why a channel is not let in."""
    context = zmq.Context()
    channel = Channel(address, role, context)
    try:
        wait_for(lambda: channel.poll(0.02) is None or channel.refusal, seconds)
        assert channel.state is not ConnectionState.OPEN
        return channel.refusal
    finally:
        channel.close()
        context.destroy(linger=0)


def test_the_key_opens(server, bystander):
    with Raw(server.address) as client:
        assert client.enter().largest == server.history.bound
    assert not server.rejected


def test_without_a_key_a_client_says_where_to_get_one(server, bystander, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "the first tap.serve() makes one, or set TENSORTAP_KEY" in refusal_of(server.address)
    with pytest.raises(NotFound, match="there is no key"):
        LiveReader(server.address, 0.5)


def test_a_client_with_another_key_is_told_so(server, bystander, monkeypatch):
    monkeypatch.setenv("TENSORTAP_KEY", keys.key_text(b"\1" * 32))
    assert "has another key: set TENSORTAP_KEY to its key" in refusal_of(server.address)


def test_a_wrong_proof_is_refused_and_counted(server, bystander):
    with Raw(server.address, key=b"\1" * 32) as client:
        client.say(wire.PROOF, client.proof(client.hello()))
        assert "wrong key: set TENSORTAP_KEY" in client.hear_a(wire.Refusal).reason
        client.batch()  # a word more is garbage, and is not answered
        wait_for(lambda: server.rejected["invalid message"] == 1)
        assert client.hear(0.1) is None
    assert server.rejected["wrong key"] == 1
    assert answers.overview(server).rejected == {"wrong key": 1, "invalid message": 1}


def test_a_proof_from_another_connection_is_worth_nothing(server, bystander):
    with Raw(server.address) as one, Raw(server.address) as other:
        one.hello()
        proof = other.proof(other.hello())
        one.say(wire.PROOF, proof)
        assert one.hear_a(wire.Refusal)
        other.say(wire.PROOF, proof)
        assert other.hear_a(wire.Welcome)
        other.say(wire.GOODBYE, wire.Goodbye())
        with Raw(server.address) as third:  # nor once its own connection has gone
            third.hello()
            third.say(wire.PROOF, proof)
            assert third.hear_a(wire.Refusal)
    assert server.rejected["wrong key"] == 2


def test_the_servers_own_proof_does_not_open(server, bystander):
    with Raw(server.address) as client:
        challenge = client.hello()
        client.say(wire.PROOF, wire.Proof(challenge.mac, wire.Client(b"mirror")))
        assert client.hear_a(wire.Refusal)
    assert server.rejected["wrong key"] == 1


def test_a_challenge_is_good_once(server, bystander):
    with Raw(server.address, key=b"\1" * 32) as client:
        challenge = client.hello()
        client.say(wire.PROOF, client.proof(challenge))
        assert client.hear_a(wire.Refusal)
        client.key = keys.find_key()
        client.say(wire.PROOF, client.proof(challenge))
        wait_for(lambda: server.rejected["invalid message"] == 1)
        assert client.hear(0.2) is None


@pytest.mark.parametrize(("mode", "words"), [(0o644, "chmod 600"), (0o640, "chmod 600")])
def test_a_key_that_others_can_read_is_not_used(server, mode, words):
    path = keys.key_path()
    path.chmod(mode)
    assert words in refusal_of(server.address)
    with pytest.raises(keys.KeyFileError, match=words):
        keys.make_key()
    path.chmod(0o600)
    assert_serves(server)


def test_the_key_file_of_another_user_is_not_used(server, monkeypatch):
    if os.getuid() == 0:
        os.chown(keys.key_path(), 65534, 65534)
    else:
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    assert "belongs to another user" in refusal_of(server.address)


STRANGER = """
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
    for i in range(40):
        tap.catch(numpy.zeros(100_000), "stranger")
        time.sleep(0.02)
    ticket = tap.catch(1, "stranger")
    print("arrived", ticket.wait(1.0))
    print("sessions", tap.receipt().sessions)
    try:
        tap.open({address!r}, 1.0)
        print("reads")
    except tap.errors.NotFound as error:
        print("no look:", error)
    # what is not a tensortap client is no better off
    socket = zmq.Context().socket(zmq.DEALER); socket.linger = 0
    socket.connect({endpoint!r})
    socket.send_multipart(wire.message(wire.QUERY, wire.Query(1, "overview")))
    print("query", socket.recv_multipart()[0] if socket.poll(2000) else None)
"""


@pytest.mark.parametrize("key", ["", "os.environ['TENSORTAP_KEY'] = keys.key_text(bytes(32))"])
def test_another_user_of_the_machine_gets_nothing(server, bystander, tmp_path, key):
    home = tmp_path / "home"  # only we can enter it
    home.mkdir(mode=0o700)
    env = {k: v for k, v in os.environ.items() if k not in ("XDG_CONFIG_HOME", "HOME")}
    if os.getuid() == 0:
        env["XDG_CONFIG_HOME"] = os.environ["XDG_CONFIG_HOME"]  # ours, and closed to him
        keys.key_path().parent.parent.chmod(0o700)
    code = textwrap.dedent(STRANGER).format(
        source=SOURCE, key=key, address=str(server.address), endpoint=server.address.endpoint
    )
    env |= {"HOME": str(home), "TENSORTAP_SERVER": str(server.address)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "arrived False"
    assert "none: " in lines[1]
    assert lines[2].startswith("no look: no live session at")
    assert lines[3] == f"query {wire.REFUSED!r}"
    assert server.history.names() == ["bystander"]
    assert server.rejected["invalid message"] == 1
    assert keys.key_text(keys.find_key()) not in done.stdout + done.stderr


@pytest.mark.parametrize("protocol", [wire.PROTOCOL + 1, wire.PROTOCOL - 1])
def test_another_version_of_the_client_is_told_both_and_counted(server, bystander, protocol):
    with Raw(server.address) as client:
        refusal = client.hello(protocol=protocol, version="9.8.7 of a monkey")
    assert (refusal.protocol, refusal.version) == (wire.PROTOCOL, __version__)
    assert f"tensortap 9.8.7 of a monkey (protocol {protocol})" in refusal.reason
    assert f"{__version__} (protocol {wire.PROTOCOL})" in refusal.reason
    assert server.rejected == {"protocol version": 1}


@pytest.mark.parametrize(("theirs", "side"), [(7, "this"), (0, "the other")])
@pytest.mark.parametrize("word", ["refusal", "challenge"])
def test_another_version_of_the_server(theirs, side, word):
    """A client says both versions and who is behind, whoever notices it first."""
    key = keys.make_key()

    def speak(route, hello):
        mac = keys.proof(key, "server", hello.nonce, bytes(16))
        words = {
            "refusal": (wire.REFUSED, wire.Refusal("upgrade no side", theirs, "9.8.7")),
            "challenge": (wire.CHALLENGE, wire.Challenge(theirs, "9.8.7", bytes(16), mac)),
        }
        return [wire.message(*words[word])]

    with impostor(speak) as (address, _):
        said = refusal_of(address)
    assert f"tensortap 9.8.7 (protocol {theirs})" in said
    assert f"this one {__version__} (protocol {wire.PROTOCOL})" in said
    assert said.endswith(f": upgrade {side} side")


@contextlib.contextmanager
def impostor(speak):
    """Somebody who holds the port but not the key; gives the address and all it was sent."""
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
                for answer in speak(route, wire.read_header(*frames[:2])):
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
    "asks": lambda r, h: [
        wire.message(wire.ACK, wire.Ack(0, 1 << 40)),
        wire.message(wire.WELCOME, wire.Welcome(1 << 30, 1 << 40)),
    ],
    "talks nonsense": lambda r, h: [[b"\xff" * 100], [b"W", b"\xc1"], [b""], [b"W"]],
}


@pytest.mark.parametrize("manner", IMPOSTORS)
def test_an_impostor_gets_neither_a_tensor_nor_the_key(manner):
    key = keys.make_key()
    with impostor(IMPOSTORS[manner]) as (address, heard):
        good = Good(address)
        assert not good.deliver("secret", timeout=1.5)
        assert good.state.startswith("none: ")
        good.close()
    assert heard
    assert set(heard[::2]) == {wire.HELLO}
    everything = b"".join(heard)
    assert b"secret" not in everything
    assert b"\x07" * 16 not in everything
    assert key not in everything
    assert keys.key_text(key).encode() not in everything


def test_what_a_stranger_says_does_not_reach_the_log_raw(caplog):
    keys.make_key()
    evil = "\x1b]0;owned\x07\x1b[2J" + "x" * 10_000
    words = lambda r, h: [wire.message(wire.REFUSED, wire.Refusal(evil))]
    with impostor(words) as (address, _):
        good = Good(address)
        wait_for(lambda: "owned" in good.state)
        said = good.state
        wait_for(lambda: "no live session" in caplog.text)
        good.close()
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


def test_over_loopback_the_key_itself_never_travels(server):
    proxy = Proxy("127.0.0.1", server.address.port)
    good = Good(Address("127.0.0.1", proxy.port), arena=False)
    assert good.deliver("seen")
    good.close()
    proxy.close()
    key = keys.find_key()
    assert b"seen" in proxy.seen  # it is not encrypted: whoever listens on loopback is root
    assert key not in proxy.seen
    assert keys.key_text(key).encode() not in proxy.seen
    secret = keys.curve_pair(key, "client")[1]
    assert secret not in proxy.seen


# -- beyond loopback ---------------------------------------------------------------------


@pytest.fixture
def public():
    """A session on all interfaces."""
    server = live.start("0.0.0.0", 0, "64MB")
    yield server
    server.close()


def own_address() -> str | None:
    """An address of this machine that is not a loopback one."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    return None


def test_beyond_loopback_everything_is_encrypted(public):
    proxy = Proxy("127.0.0.1", public.address.port)
    good = Good(Address("127.0.0.1", proxy.port), arena=False)
    assert good.deliver("secret")
    good.close()
    proxy.close()
    assert public.history.names() == ["secret"]
    assert len(proxy.seen) > 100_000
    for secret in (b"secret", b"\x07" * 8, b"numpy", keys.find_key()):
        assert secret not in proxy.seen


def test_a_session_on_all_interfaces_is_found_under_any_address(public):
    hosts = ["127.0.0.1", socket.gethostname(), own_address() or "127.0.0.1"]
    for number, host in enumerate(hosts):
        good = Good(Address(host, public.address.port))
        assert good.deliver(f"from {number}"), good.state
        assert "shared memory" in good.state
        good.close()
    assert public.history.names() == ["from 0", "from 1", "from 2"]


def test_curve_with_another_key_is_refused_and_counted(public):
    address = Address("127.0.0.1", public.address.port)
    with Raw(address, curve=b"\1" * 32) as client:
        client.say(wire.HELLO, wire.Hello(wire.PROTOCOL, __version__, "source", bytes(16)))
        # a stranger who does not even know the server's key gets no further than that
        wait_for(lambda: sum(public.rejected.values()) >= 1)
    with Raw(address) as client:
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
    good = Good(Address("127.0.0.1", public.address.port))
    assert good.deliver()
    good.close()


def test_plaintext_to_an_encrypted_session_is_refused_and_counted(public):
    with Raw(Address("127.0.0.1", public.address.port)) as client:
        client.say(wire.HELLO, wire.Hello(wire.PROTOCOL, __version__, "source", bytes(16)))
        wait_for(lambda: public.rejected["failed handshake"] >= 1)
        assert client.hear(0.2) is None
    assert_serves_at(public)


def test_the_greeting_says_what_to_set_on_the_training_side(public, monkeypatch):
    said = live.greeting(public).splitlines()
    exports = dict(
        line.strip().removeprefix("export ").split("=", 1) for line in said if "export" in line
    )
    assert list(exports) == ["TENSORTAP_SERVER", "TENSORTAP_KEY"]
    assert exports["TENSORTAP_SERVER"] == f"{socket.gethostname()}:{public.address.port}"
    # they are enough, on a machine that has neither
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


def test_on_loopback_the_greeting_shows_no_key(server):
    said = live.greeting(server)
    assert keys.key_text(keys.find_key()) not in said
    assert "export" not in said
