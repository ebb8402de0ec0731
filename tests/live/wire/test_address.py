"""Addresses of servers, as people write them."""

from __future__ import annotations

import pytest

from tensortap.live.address import DEFAULT_PORT, Address, default_port, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu7", "gpu7", DEFAULT_PORT), ("gpu7:4000", "gpu7", 4000),
        ("gpu7:", "gpu7", DEFAULT_PORT), (" gpu7:4000 ", "gpu7", 4000),
        ("10.0.0.1:0", "10.0.0.1", 0), ("localhost", "127.0.0.1", DEFAULT_PORT),
        ("localhost:4000", "127.0.0.1", 4000), ("::1", "::1", DEFAULT_PORT),
        ("[::1]", "::1", DEFAULT_PORT), ("[::1]:4000", "::1", 4000),
        ("[fe80::1%eth0]:4000", "fe80::1%eth0", 4000),
        ("2001:db8::2", "2001:db8::2", DEFAULT_PORT),
    ],
)  # fmt: skip
def test_parse_address(text, host, port):
    assert parse_address(text) == Address(host, port)


@pytest.mark.parametrize("text", ["h:65536", "h:-1", "h:x", "h:4 000", "h:1.5", "[::1]x"])
def test_rejects_bad_ports(text):
    with pytest.raises(ValueError, match="port must be a number from 0 to 65535"):
        parse_address(text)


@pytest.mark.parametrize("text", [":4000", "[]:4000", "[", ":"])
def test_rejects_missing_host(text):
    with pytest.raises(ValueError, match="address must be 'host' or 'host:port'"):
        parse_address(text)


def test_environment_variables(monkeypatch):
    assert parse_address() == parse_address("") == Address("127.0.0.1", DEFAULT_PORT)
    monkeypatch.setenv("TENSORTAP_PORT", "3000")
    assert default_port() == 3000
    assert parse_address() == Address("127.0.0.1", 3000)
    monkeypatch.setenv("TENSORTAP_SERVER", "gpu7")
    assert parse_address() == Address("gpu7", 3000)
    monkeypatch.setenv("TENSORTAP_SERVER", "gpu7:4000")
    assert parse_address() == Address("gpu7", 4000)
    assert parse_address("other") == Address("other", 3000)
    monkeypatch.setenv("TENSORTAP_PORT", "many")
    with pytest.raises(ValueError, match="got 'many'"):
        parse_address("other")
    monkeypatch.setenv("TENSORTAP_PORT", "")
    assert default_port() == DEFAULT_PORT


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("gpu7", False), ("127.0.0.1.evil.org", False), ("", False)],
)  # fmt: skip
def test_loopback(host, loopback):
    assert Address(host, 1).loopback is loopback


def test_zeromq_endpoint():
    assert Address("::1", 5).endpoint == "tcp://[::1]:5"
    assert Address("gpu7", 5).endpoint == "tcp://gpu7:5"
    assert parse_address(str(Address("::1", 5))) == Address("::1", 5)
