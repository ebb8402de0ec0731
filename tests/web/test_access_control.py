"""Access control: the token, the cookie, the Host and the Origin."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import websockets

from tensortap.web.access_control import AccessControl
from tests.web.conftest import cookie_of


@pytest.mark.parametrize(
    "path",
    ["/", "/static/main.js", "/plotly.js", "/api/catalog", "/api/tensor.npy?run=a&name=head", "/x"],
)
@pytest.mark.attack("page without its token")
def test_rejects_requests_without_a_cookie(page, path):
    answer = httpx.get(f"{page.address}{path[1:]}")
    assert answer.status_code == 401
    assert "the address that tensortap printed" in answer.text


@pytest.mark.attack("page without its token")
def test_rejects_a_wrong_token(page):
    assert httpx.get(f"{page.address}?token=wrong").status_code == 401
    assert "set-cookie" not in httpx.get(f"{page.address}?token=wrong").headers


def test_exchanges_the_token_for_a_cookie(page):
    answer = httpx.get(f"{page.url}&more=1", follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/?more=1"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert page.access.token not in cookie
    assert str(page.port) in cookie  # two pages on one machine must not share it


def test_continues_without_a_redirect_when_opened_from_another_site(page):
    # browsers do not send a strict cookie with a redirect that began on another site
    answer = httpx.get(page.url, headers={"sec-fetch-site": "cross-site"}, follow_redirects=False)
    assert answer.status_code == 200
    assert "set-cookie" in answer.headers
    assert page.access.token not in answer.text
    assert httpx.get(f"{page.address}enter.js").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", ""]
)
@pytest.mark.attack("page under another host name")
def test_rejects_other_host_names(page, host):
    headers = {"host": host.format(port=page.port), "cookie": cookie_of(page)}
    answer = httpx.get(f"{page.address}api/catalog", headers=headers)
    assert answer.status_code in (400, 421)
    assert "entries" not in answer.text


def test_accepts_the_port_of_a_tunnel(page):
    headers = {"host": "localhost:9999", "cookie": cookie_of(page)}
    assert httpx.get(f"{page.address}api/catalog", headers=headers).status_code == 200


@pytest.mark.attack("page from another origin")
def test_rejects_other_origins(page, client):
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{page.port + 1}"):
        answer = client.post("/api/compare/start?run=a&other=b", headers={"origin": origin})
        assert answer.status_code == 403
        assert client.get("/api/catalog", headers={"origin": origin}).status_code == 403
    own = {"origin": f"http://127.0.0.1:{page.port}"}
    assert client.get("/api/catalog", headers=own).status_code == 200


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ({}, False),
        ({"cookie": True, "origin": "http://evil.example"}, False),
        ({"cookie": True, "host": "evil.example"}, False),
        ({"cookie": True, "origin": True}, True),
    ],
)
@pytest.mark.attack("page from another origin")
def test_checks_the_websocket_too(page, headers, accepted):
    said = dict(headers)
    if said.get("cookie"):
        said["cookie"] = cookie_of(page)
    if said.get("origin") is True:
        said["origin"] = f"http://127.0.0.1:{page.port}"
    host = said.pop("host", None)

    async def connect():
        where = f"ws://{host or '127.0.0.1'}:{page.port}/push"
        sent = {k: v for k, v in said.items() if k != "origin"}
        async with websockets.connect(
            where, host="127.0.0.1", port=page.port, additional_headers=sent,
            origin=said.get("origin"), proxy=None,
        ):  # fmt: skip
            return True

    if accepted:
        assert asyncio.run(connect())
    else:
        with pytest.raises(websockets.InvalidStatus) as rejection:
            asyncio.run(connect())
        assert rejection.value.response.status_code == 403


def test_adds_security_headers_to_every_response(client):
    for path in ("/", "/api/catalog", "/static/main.js", "/nothing"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe-eval" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/api/catalog").headers["cache-control"] == "no-store"
    assert "immutable" in client.get("/plotly.js").headers["cache-control"]


def test_accepts_the_name_of_a_proxy():
    access = AccessControl("127.0.0.1", 2876, ["Notebooks.example.org"])
    assert access.accepts_host("notebooks.example.org:443")
    assert not access.accepts_host("example.org")


def test_accepts_names_and_addresses_of_this_machine_on_all_interfaces():
    import socket

    access = AccessControl("0.0.0.0", 2876)
    assert access.accepts_host("192.168.1.7:2876")
    assert access.accepts_host(socket.gethostname())
    assert not access.accepts_host("evil.example")
    for broken in ("a b", "[::1", "x:y", "::1", "evil.example:80:80", "a;b"):
        assert not AccessControl("127.0.0.1", 2876).accepts_host(broken)
