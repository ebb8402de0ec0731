"""The key file, and what is derived from the key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from tensortap.live import keys

SOURCE = str(Path(__file__).parents[3] / "src")


def test_creates_a_key_that_only_its_user_can_read():
    assert keys.find_key() is None
    key = keys.make_key()
    path = keys.key_path()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert keys.find_key() == keys.make_key() == key
    assert len(key) == 32
    assert os.listdir(path.parent) == ["key"]


def test_key_file_mode_ignores_the_umask():
    before = os.umask(0)
    try:
        keys.make_key()
    finally:
        os.umask(before)
    assert keys.key_path().stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_concurrent_processes_agree_on_one_key():
    """Real processes that wait for each other before they create the key."""
    code = f"""
import sys; sys.path.insert(0, {SOURCE!r})
from tensortap.live import keys
print("ready", flush=True); sys.stdin.readline()
print(keys.key_text(keys.make_key()))
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    found = {process.communicate(timeout=60)[0].strip() for process in started}
    assert found == {keys.key_text(keys.find_key())}
    assert os.listdir(keys.key_path().parent) == ["key"]


def test_environment_variable_overrides_the_key_file(monkeypatch):
    keys.make_key()
    monkeypatch.setenv("TENSORTAP_KEY", keys.key_text(b"k" * 32))
    assert keys.find_key() == keys.make_key() == b"k" * 32


@pytest.mark.parametrize("text", ["hello", "tap1-", "tap1-abc", "tap2-" + "A" * 43, "tap1-é", "  "])
def test_rejects_malformed_keys(monkeypatch, text):
    monkeypatch.setenv("TENSORTAP_KEY", text)
    with pytest.raises(keys.KeyFileError, match="set TENSORTAP_KEY to what serve"):
        keys.find_key()


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\xff\xfe\x00", b"x" * 100_000])
def test_rejects_a_file_without_a_key(content):
    path = keys.key_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(keys.KeyFileError, match=r"has no tensortap key: remove it"):
        keys.find_key()
    assert path.read_bytes() == content


def test_key_path_is_a_folder():
    keys.key_path().mkdir(parents=True)
    with pytest.raises(keys.KeyFileError, match="cannot read"):
        keys.find_key()


def test_user_without_a_home_folder(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    with pytest.raises(keys.KeyFileError, match="no home folder: set TENSORTAP_KEY"):
        keys.find_key()


def test_unwritable_config_folder(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    assert keys.find_key() is None
    with pytest.raises(keys.KeyFileError, match="cannot write /proc/nowhere/tensortap/key"):
        keys.make_key()


def test_curve_keys_are_derived_from_the_key():
    public, secret = keys.curve_pair(bytes(32), "server")
    assert zmq.curve_public(secret) == public
    assert keys.curve_pair(bytes(32), "server") == (public, secret)
    assert keys.curve_pair(bytes(32), "client") != (public, secret)
    assert keys.curve_pair(b"x" * 32, "server") != (public, secret)


def test_key_text_round_trip():
    for key in (bytes(32), b"\xff" * 32, os.urandom(32)):
        text = keys.key_text(key)
        assert text.startswith("tap1-")
        assert text.replace("-", "").replace("_", "").isalnum()
        assert keys.parse_key(f" {text}\n") == key
