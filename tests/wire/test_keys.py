"""The key file, and what is derived from the key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from tensortap.wire import keys

SOURCE = str(Path(__file__).parents[2] / "src")


def test_the_first_session_makes_a_key_that_only_its_user_can_read():
    assert keys.find_key() is None
    key = keys.make_key()
    path = keys.key_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert keys.find_key() == keys.make_key() == key
    assert len(key) == 32
    assert os.listdir(path.parent) == ["key"]


def test_the_umask_does_not_matter():
    before = os.umask(0)
    try:
        keys.make_key()
    finally:
        os.umask(before)
    assert keys.key_path().stat().st_mode & 0o777 == 0o600


def test_sessions_that_start_together_agree_on_one_key():
    """Real processes, held back until all of them are there."""
    code = f"""
import sys; sys.path.insert(0, {SOURCE!r})
from tensortap.wire import keys
print("ready", flush=True); sys.stdin.readline()
print(keys.key_text(keys.make_key()))
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    found = {process.communicate(timeout=30)[0].strip() for process in started}
    assert found == {keys.key_text(keys.find_key())}
    assert os.listdir(keys.key_path().parent) == ["key"]


def test_the_environment_comes_first(monkeypatch):
    keys.make_key()
    monkeypatch.setenv("TENSORTAP_KEY", keys.key_text(b"k" * 32))
    assert keys.find_key() == keys.make_key() == b"k" * 32


@pytest.mark.parametrize("text", ["hello", "tap1-", "tap1-abc", "tap2-" + "A" * 43, "tap1-é", "  "])
def test_what_is_no_key(monkeypatch, text):
    monkeypatch.setenv("TENSORTAP_KEY", text)
    with pytest.raises(keys.KeyFileError, match="set TENSORTAP_KEY to what serve"):
        keys.find_key()


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\xff\xfe\x00", b"x" * 100_000])
def test_a_file_without_a_key(content):
    path = keys.key_path()
    path.parent.mkdir()
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(keys.KeyFileError, match=r"no tensortap key is in .*: remove it"):
        keys.find_key()
    assert path.read_bytes() == content


def test_a_folder_in_the_place_of_the_key():
    keys.key_path().mkdir(parents=True)
    with pytest.raises(keys.KeyFileError, match="cannot read"):
        keys.find_key()


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    with pytest.raises(keys.KeyFileError, match="no home for a key: set TENSORTAP_KEY"):
        keys.find_key()


def test_a_place_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    assert keys.find_key() is None
    with pytest.raises(keys.KeyFileError, match="cannot write /proc/nowhere/tensortap/key"):
        keys.make_key()


def test_proofs_are_of_one_role_and_two_nonces():
    key, a, b = bytes(32), b"a" * 16, b"b" * 16
    mac = keys.proof(key, "client", a, b)
    assert keys.proven(key, "client", a, b, mac)
    assert not keys.proven(key, "server", a, b, mac)
    assert not keys.proven(key, "client", b, a, mac)
    assert not keys.proven(b"x" * 32, "client", a, b, mac)
    assert not keys.proven(key, "client", a, b, b"")
    assert not keys.proven(key, "client", a, b, mac[:-1])


def test_curve_keys_come_from_the_key_alone():
    public, secret = keys.curve_pair(bytes(32), "server")
    assert zmq.curve_public(secret) == public
    assert keys.curve_pair(bytes(32), "server") == (public, secret)
    assert keys.curve_pair(bytes(32), "client") != (public, secret)
    assert keys.curve_pair(b"x" * 32, "server") != (public, secret)


def test_the_text_of_a_key_is_one_word_and_comes_back():
    for key in (bytes(32), b"\xff" * 32, os.urandom(32)):
        text = keys.key_text(key)
        assert text.startswith("tap1-")
        assert text.replace("-", "").replace("_", "").isalnum()
        assert keys.parse_key(f" {text}\n") == key
