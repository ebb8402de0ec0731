"""Access control: the token, the cookie, the key, the Host and the Origin."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.server
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import websockets
from playwright import sync_api as playwright

from tensortap.page import view as view_module
from tensortap.page.access_control import AccessControl
from tests.page.conftest import enter, get, serving

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@pytest.mark.parametrize(
    "path",
    ["/", "/static/main.js", "/plotly.js", "/api/catalog", "/api/tensor.npy?run=a&name=head", "/x"],
)
@pytest.mark.attack("page without its token")
def test_rejects_requests_without_secrets(page, path):
    answer = get(f"{page.address}{path[1:]}")
    assert answer.status_code == 401
    assert "the address that tensortap printed" in answer.text


# -- the token -------------------------------------------------------------------------------


@pytest.mark.attack("page without its token")
def test_rejects_a_wrong_token(page):
    answer = get(f"{page.address}?token=wrong")
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_exchanges_a_token_for_a_cookie_and_a_key(page):
    url = page.url
    answer = get(url)
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert url.rpartition("=")[2] not in cookie + answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert get(f"{page.address}enter.js").status_code == 200


@pytest.mark.attack("page with a used token")
def test_a_token_opens_the_page_once(page):
    url = page.url
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: get(url), range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] + [401] * 7
    (cookie,) = (a.headers["set-cookie"] for a in answers if a.status_code == 200)
    # the browser that has used it may load the address again
    again = get(url, headers={"cookie": cookie.split(";")[0]}, follow_redirects=False)
    assert (again.status_code, again.headers["location"]) == (303, "/")
    assert "set-cookie" not in again.headers


def test_forgets_the_oldest_of_many_tokens():
    access = AccessControl("127.0.0.1", 2876)
    tokens = [access.new_token() for _ in range(100)]
    assert [access.is_unused(token) for token in tokens] == [False] * 36 + [True] * 64


@pytest.mark.attack("token on the command line")
def test_the_token_is_not_on_the_command_line_of_the_browser(page, tmp_path, monkeypatch):
    """Other users can list processes, but cannot read the file that the browser opens."""
    seen, browser = tmp_path / "seen", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$0 $*" > "{seen}"\n')
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    code = "import sys, webbrowser; sys.exit(not webbrowser.open(sys.argv[1]))"

    def open_in_browser(url):  # in another process, because webbrowser reads BROWSER once
        return subprocess.run([sys.executable, "-c", code, url], check=False).returncode == 0

    monkeypatch.setattr("webbrowser.open", open_in_browser)
    view_module._open_browser(page, "a")
    (command,) = re.findall(r"file://\S+", seen.read_text())
    assert "token=" not in seen.read_text()
    file = Path(command.removeprefix("file://"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_uid == os.getuid()
    url = re.search(r'url=([^"]+)"', file.read_text())[1]
    assert url.endswith("#run=a")
    assert get(url).status_code == 200
    assert get(url).status_code == 401
    page._delete_files()
    assert not file.exists()


# -- the cookie and the key ------------------------------------------------------------------


@pytest.mark.attack("page with a stolen cookie")
def test_the_cookie_alone_opens_only_the_files_of_the_page(page):
    """Browsers send cookies to all ports of a host: servers of other users get to know it."""
    headers = enter(page)
    stolen = {"cookie": headers["cookie"]}
    assert get(page.address, headers=stolen).status_code == 200
    for path in ("api/catalog", "api/run?run=a", "api/tensor.npy?run=a&name=head", "api/nothing"):
        assert get(f"{page.address}{path}", headers=stolen).status_code == 401
        assert get(f"{page.address}{path}&signature=", headers=stolen).status_code == 401
    for key in ("", "none", headers["x-tensortap-key"][:-1]):
        wrong = {**stolen, "x-tensortap-key": key}
        assert get(f"{page.address}api/catalog", headers=wrong).status_code == 401
    for path in ("", "static/main.js", "static/api.js", "enter.js", "?token=wrong"):
        served = get(f"{page.address}{path}", headers=stolen).text
        assert headers["x-tensortap-key"] not in served
    key_only = {"x-tensortap-key": headers["x-tensortap-key"]}
    assert get(f"{page.address}api/catalog", headers=key_only).status_code == 401
    assert get(f"{page.address}api/catalog", headers=headers).status_code == 200


def test_the_cookie_has_another_name_on_every_server():
    one, other = (AccessControl("127.0.0.1", 2876) for _ in range(2))
    assert one.cookie.startswith("tensortap_2876_")
    assert len(one.cookie) >= 30
    assert one.cookie != other.cookie


@pytest.mark.attack("page with a stolen cookie")
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium, which make test installs")
def test_a_server_on_another_port_gets_no_data(runs):
    """A real browser sends the cookie to another port, and keeps the key from it."""
    stolen = []

    class Thief(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            stolen.append(self.headers.get("cookie"))
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<link rel=icon href=data:,>")

        def log_message(self, *_):
            pass

    with (
        serving(runs) as page,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Thief) as thief,
        playwright.sync_playwright() as driver,
    ):
        threading.Thread(target=thief.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        # from a file, as tap.view opens it
        tab.goto(page.redirect_file("#run=a&tab=tensors").as_uri())
        tab.wait_for_selector("body[data-push=open]", timeout=60_000)
        assert tab.url.startswith(f"{page.address}#run=a")
        with tab.expect_download(timeout=60_000) as download:
            tab.get_by_text("Download .npy").click()
        assert Path(download.value.path()).read_bytes().startswith(b"\x93NUMPY")
        tab.goto(f"http://127.0.0.1:{thief.server_port}/")
        storage = tab.evaluate("Object.keys(localStorage)")
        refused = tab.evaluate(
            f"fetch('{page.address}api/catalog', {{credentials: 'include'}})"
            ".then((answer) => answer.text()).catch((error) => 'refused')"
        )
        browser.close()
        thief.shutdown()
        assert stolen[0].startswith(page.access.cookie)  # if not, the attack was not tried
        assert storage == []
        assert refused == "refused"
        answer = get(f"{page.address}api/catalog", headers={"cookie": stolen[0]})
        assert answer.status_code == 401


def test_signed_addresses_need_no_key(page, client):
    asked = "/api/tensor?run=raw&name=cube&kind=Value&step=2"
    address = client.get(asked).json()["download"]
    cookie = {"cookie": client.headers["cookie"]}
    download = get(f"{page.address}{address[1:]}", headers=cookie)
    assert download.content.startswith(b"\x93NUMPY")
    assert get(f"{page.address}{address[1:]}").status_code == 401
    other = address.replace("step=2", "step=1"), address.replace("tensor.npy", "tensor"), (
        f"{address}&name=big"
    ), address[:-1]  # fmt: skip
    for changed in other:
        answer = get(f"{page.address}{changed[1:]}", headers=cookie)
        assert answer.status_code == 401, changed


# -- other sites -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", ""]
)
@pytest.mark.attack("page under another host name")
def test_rejects_other_host_names(page, host):
    headers = {**enter(page), "host": host.format(port=page.port)}
    answer = get(f"{page.address}api/catalog", headers=headers)
    assert answer.status_code in (400, 421)
    assert "entries" not in answer.text


def test_accepts_the_port_of_a_tunnel(page):
    headers = {**enter(page), "host": "localhost:9999"}
    assert get(f"{page.address}api/catalog", headers=headers).status_code == 200


@pytest.mark.attack("page from another origin")
def test_rejects_other_origins(page, client):
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{page.port + 1}"):
        answer = client.post("/api/compare/start?run=a&other=b", headers={"origin": origin})
        assert answer.status_code == 403
        assert client.get("/api/catalog", headers={"origin": origin}).status_code == 403
    own = {"origin": f"http://127.0.0.1:{page.port}"}
    assert client.get("/api/catalog", headers=own).status_code == 200


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"origin": "http://127.0.0.1:{port}"}, True),
        ({"origin": "http://evil.example"}, False),
        ({"host": "evil.example"}, False),
        ({"cookie": "x=y"}, False),
        ({"x-tensortap-key": "none"}, False),
    ],
)
@pytest.mark.attack("page from another origin")
def test_checks_the_websocket_too(page, changes, accepted):
    sent = {**enter(page), **changes}
    host, origin = sent.get("host", "127.0.0.1"), sent.get("origin", "").format(port=page.port)

    async def connect():
        async with websockets.connect(
            f"ws://{host}:{page.port}/push", host="127.0.0.1", port=page.port, proxy=None,
            origin=origin or None, additional_headers={"cookie": sent["cookie"]},
            subprotocols=["tensortap", sent["x-tensortap-key"]],
        ) as socket:  # fmt: skip
            return socket.subprotocol

    if accepted:
        assert asyncio.run(connect()) == "tensortap"
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
