"""Who gets in: the token, the cookie, the Host and the Origin."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import websockets

from tensortap.web.auth import Door
from tests.web.conftest import cookie_of


@pytest.mark.parametrize(
    "path",
    ["/", "/static/main.js", "/plotly.js", "/api/library", "/api/tensor.npy?run=a&name=head", "/x"],
)
def test_without_the_token_nothing_is_given(page, path):
    answer = httpx.get(f"{page.address}{path[1:]}")
    assert answer.status_code == 401
    assert "the address that tensortap printed" in answer.text


def test_a_wrong_token_is_refused(page):
    assert httpx.get(f"{page.address}?token=wrong").status_code == 401
    assert "set-cookie" not in httpx.get(f"{page.address}?token=wrong").headers


def test_the_token_becomes_a_cookie_and_leaves_the_address(page):
    answer = httpx.get(f"{page.url}&more=1", follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/?more=1"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert page.door.token not in cookie
    assert str(page.port) in cookie  # two pages on one machine do not share it


def test_from_another_site_the_page_itself_goes_on(page):
    # a strict cookie is not sent with a redirect that began elsewhere
    answer = httpx.get(page.url, headers={"sec-fetch-site": "cross-site"}, follow_redirects=False)
    assert answer.status_code == 200
    assert "set-cookie" in answer.headers
    assert page.door.token not in answer.text
    assert httpx.get(f"{page.address}enter.js").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", ""]
)
def test_another_name_for_this_machine_is_refused(page, host):
    headers = {"host": host.format(port=page.port), "cookie": cookie_of(page)}
    answer = httpx.get(f"{page.address}api/library", headers=headers)
    assert answer.status_code in (400, 421)
    assert "shown" not in answer.text


def test_a_tunnel_has_another_port(page):
    headers = {"host": "localhost:9999", "cookie": cookie_of(page)}
    assert httpx.get(f"{page.address}api/library", headers=headers).status_code == 200


def test_another_origin_is_refused(page, client):
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{page.port + 1}"):
        answer = client.post("/api/compare/start?run=a&other=b", headers={"origin": origin})
        assert answer.status_code == 403
        assert client.get("/api/library", headers={"origin": origin}).status_code == 403
    own = {"origin": f"http://127.0.0.1:{page.port}"}
    assert client.get("/api/library", headers=own).status_code == 200


@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({}, False),
        ({"cookie": True, "origin": "http://evil.example"}, False),
        ({"cookie": True, "host": "evil.example"}, False),
        ({"cookie": True, "origin": True}, True),
    ],
)
def test_the_socket_is_guarded_like_the_rest(page, headers, let_in):
    said = dict(headers)
    if said.get("cookie"):
        said["cookie"] = cookie_of(page)
    if said.get("origin") is True:
        said["origin"] = f"http://127.0.0.1:{page.port}"
    host = said.pop("host", None)

    async def knock():
        where = f"ws://{host or '127.0.0.1'}:{page.port}/push"
        sent = {k: v for k, v in said.items() if k != "origin"}
        async with websockets.connect(
            where, host="127.0.0.1", port=page.port, additional_headers=sent,
            origin=said.get("origin"), proxy=None,
        ):  # fmt: skip
            return True

    if let_in:
        assert asyncio.run(knock())
    else:
        with pytest.raises(websockets.InvalidStatus) as refused:
            asyncio.run(knock())
        assert refused.value.response.status_code == 403


def test_every_answer_tells_browsers_to_be_careful(client):
    for path in ("/", "/api/library", "/static/main.js", "/nothing"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe-eval" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/api/library").headers["cache-control"] == "no-store"
    assert "immutable" in client.get("/plotly.js").headers["cache-control"]


def test_a_proxy_has_a_name_that_was_given():
    door = Door("127.0.0.1", 2876, ["Notebooks.example.org"])
    assert door.knows_host("notebooks.example.org:443")
    assert not door.knows_host("example.org")


def test_beyond_this_machine_its_names_and_addresses_are_good():
    import socket

    door = Door("0.0.0.0", 2876)
    assert door.knows_host("192.168.1.7:2876")
    assert door.knows_host(socket.gethostname())
    assert not door.knows_host("evil.example")
    for broken in ("a b", "[::1", "x:y", "::1", "evil.example:80:80", "a;b"):
        assert not Door("127.0.0.1", 2876).knows_host(broken)
