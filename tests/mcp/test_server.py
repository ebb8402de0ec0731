"""Real servers: over stdin, over HTTP with a token, and the example of an agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import numpy as np
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

import tensortap as tap
from tests.processes import gone

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"
INITIALIZE = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {},
               "clientInfo": {"name": "test", "version": "1"}},
}  # fmt: skip
ACCEPTED = {"accept": "application/json, text/event-stream", "content-type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tap.init(folder)
    for step in range(3):
        tap.step(step)
        tap.catch(np.full(4, float(step)), "w\x1b[2J")
    tap.finish()
    return folder


async def ask(client):
    """Ask three questions; return the names of the tools and the statistics."""
    tools = [tool.name for tool in (await client.list_tools()).tools]
    names = json.loads((await client.call_tool("names", {})).content[0].text)["rows"]
    found = await client.call_tool("statistics", {"name": names[0]["name"], "statistics": ["max"]})
    return tools, json.loads(found.content[0].text)


def check(answers):
    tools, found = answers
    assert " ".join(tools[:9]) == "runs summary names statistics alerts health compare why figure"
    assert found["name"] == "w�[2J"
    assert [row["max"] for row in found["rows"]] == [0.0, 1.0, 2.0]


@contextlib.contextmanager
def http_server(folder, *options):
    """Yield the address and the token of a server; end it with Ctrl-C."""
    command = [sys.executable, "-m", "tensortap", "mcp", str(folder), "--http", "--port", "0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().rpartition(" ")[2].strip()
            token = process.stdout.readline().rpartition(" ")[2].strip()
            yield address, token
            process.send_signal(signal.SIGINT)
            assert process.wait(60) in (0, 130, -signal.SIGINT)
        finally:
            process.kill()


@pytest.mark.slow
def test_stdio(folder):
    async def session():
        command = ["-m", "tensortap", "mcp", str(folder)]
        parameters = StdioServerParameters(command=sys.executable, args=command)
        async with Client(parameters) as client:
            return await ask(client)

    check(asyncio.run(session()))


@pytest.mark.slow
def test_a_server_ends_with_its_client(folder):
    command = [sys.executable, "-m", "tensortap", "mcp", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert "never an instruction" in answer["result"]["instructions"]
        process.stdin.close()
        assert process.wait(60) == 0
    assert gone(process.pid)


@pytest.mark.slow
@pytest.mark.attack("page without its token")
def test_http_needs_the_token_and_its_own_name(folder, record_property):
    with http_server(folder) as (address, token):

        async def session():
            headers = {"authorization": f"Bearer {token}"}
            async with (
                httpx2.AsyncClient(headers=headers, timeout=60) as http,
                Client(streamable_http_client(address, http_client=http)) as client,
            ):
                return await ask(client)

        check(asyncio.run(session()))
        good = {**ACCEPTED, "authorization": f"Bearer {token}"}
        own = address.removesuffix("/mcp")
        wrong = "", "Bearer", "Bearer wrong", token, f"Basic {token}"
        hosts = "evil.example", "evil.example:80", "0.0.0.0"
        origins = "http://evil.example", "null", "http://127.0.0.1:1"
        refused = {
            401: [ACCEPTED, *({**good, "authorization": each} for each in wrong)],
            421: [{**good, "host": each} for each in hosts],
            403: [{**good, "origin": each} for each in origins],
        }
        record_property("tried", sum(map(len, refused.values())))
        with httpx2.Client(timeout=60) as http:
            assert http.post(address, json=INITIALIZE, headers=good).status_code == 200
            assert http.post(address, json=INITIALIZE, headers={**good, "origin": own}).is_success
            for status, requests in refused.items():
                for headers in requests:
                    answer = http.post(address, json=INITIALIZE, headers=headers)
                    assert answer.status_code == status, (headers, answer.text)
                    assert "tensortap records" not in answer.text
            assert http.get(f"{address}?token={token}", headers=ACCEPTED).status_code == 401
        listening = int(address.rpartition(":")[2].partition("/")[0])
        table = Path("/proc/net/tcp").read_text()
        assert f"0100007F:{listening:04X} " in table
        assert f"00000000:{listening:04X} " not in table


@pytest.mark.slow
def test_the_example_finds_the_planted_bug(tmp_path):
    """By the answers of the tools alone: the agent gets a folder, and no other hint."""
    environment = {**os.environ, "TENSORTAP_SERVER": "127.0.0.1:1"}

    def python(script, *arguments):
        command = [sys.executable, str(EXAMPLE / script), str(tmp_path / "runs"), *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=300
        )

    python("train.py", "eps")
    python("train.py")
    ended = python("agent.py")
    found = json.loads(ended.stdout)
    code = (EXAMPLE / "train.py").read_text().splitlines()
    planted = next(number for number, line in enumerate(code, 1) if "self.eps)" in line)
    assert found["line"] == f"{EXAMPLE / 'train.py'}:{planted}"
    assert found["code"] == code[planted - 1].strip()
    assert (found["module"], found["step"], found["last finite step"]) == ("standardize", 12, 11)
    assert found["why"].startswith("0/0")
    assert "standardize" in found["culprit"]
    sizes = [
        int(line.split()[-2].replace(",", ""))
        for line in ended.stderr.splitlines()
        if "bytes" in line
    ]
    assert len(sizes) == 9
    assert max(sizes) <= 20_000
