"""Requests that never become complete."""

from __future__ import annotations

import contextlib
import http.client
import socket

import pytest

from tensortap.page.catalog import Catalog
from tensortap.page.server import Page

HALVES = {
    "nothing": b"",
    "half a line": b"GET / HT",
    "half a head": b"GET / HTTP/1.1\r\nHost: localhost\r\n",
    "half a body": b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc",
    "half of the second": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nHo",
}


@pytest.fixture
def page(monkeypatch):
    monkeypatch.setattr("tensortap.page.server._REQUEST_TIMEOUT", 0.3)
    monkeypatch.setattr("tensortap.page.server._MOST_WAITING", 1000)
    page = Page(Catalog(), port=0)
    yield page
    page.close()


@pytest.mark.slow
@pytest.mark.attack("half-open requests to the page")
def test_many_connections_take_few_descriptors(page, monkeypatch):
    """The oldest without a request is closed for each new one; an answered stranger is not kept."""
    monkeypatch.setattr("tensortap.page.server._REQUEST_TIMEOUT", 60)
    monkeypatch.setattr("tensortap.page.server._MOST_WAITING", 10)
    silent = [socket.create_connection(("127.0.0.1", page.port), 60) for _ in range(50)]
    for connection in silent[:40]:
        assert connection.recv(1) == b""
    client = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    client.request("GET", "/")
    answer = client.getresponse()
    assert (answer.status, answer.getheader("connection")) == (401, "close")
    for connection in (*silent, client):
        connection.close()


@pytest.mark.attack("half-open requests to the page")
@pytest.mark.slow
def test_half_open_requests_are_closed(page):
    """A hundred connections for each way to send half a request."""
    connections = []
    for half in HALVES.values():
        for _ in range(100):
            connection = socket.create_connection(("127.0.0.1", page.port), 60)
            with contextlib.suppress(ConnectionError):  # it may have been too slow
                connection.sendall(half)
            connections.append(connection)
    for connection in connections:
        connection.settimeout(60)
        with connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass  # until the page closes it
    client = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    client.request("GET", "/")
    assert client.getresponse().status == 401  # no token, but an answer
    client.close()
