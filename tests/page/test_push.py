"""What the server pushes to browsers: only what is new, and only the latest to slow ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil

import pytest
import websockets

from tensortap.page.catalog import Catalog, RunEntry
from tensortap.page.push import Subscriber, refresh_entry, run_news
from tests.page.conftest import Writer, enter, logged_in, serving

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def connected(page):
    where, headers = f"ws://127.0.0.1:{page.port}/push", enter(page)
    async with websockets.connect(
        where, additional_headers={"cookie": headers["cookie"]}, proxy=None,
        subprotocols=["tensortap", headers["x-tensortap-key"]],
    ) as socket:  # fmt: skip
        yield socket


async def receive(socket, seconds=60):
    return json.loads(await asyncio.wait_for(socket.recv(), seconds))


async def send(socket, **message):
    await socket.send(json.dumps(message))


async def until(socket, wanted):
    """Confirm messages until one fulfills the condition; return it."""
    while True:
        news = await receive(socket)
        await send(socket, seen=news["n"])
        if wanted(news):
            return news


def test_sends_only_what_is_new(tmp_path):
    run = Writer(tmp_path, "r")
    for step in range(3):
        run.step(step)
    run.flush()

    async def talk(page):
        async with connected(page) as socket:
            await send(socket, show="r", version=0, step=2)
            first = (await until(socket, lambda n: "run" in n))["run"]
            assert first["steps"] == []  # it knew them
            run.step(3)
            run.step(4)
            run.flush()
            seen, told = [], [*first["training"]["loss"][0]]
            while seen[-1:] != [4]:
                said = (await until(socket, lambda n: "run" in n))["run"]
                seen += said["steps"]
                for step, value in zip(*said["training"].get("loss", [[], []]), strict=True):
                    assert value == 3.0 / (1 + step)
                    told.append(step)
            assert told == [2, 3, 4]  # and the loss of the last known step
            assert seen == [3, 4]
            # the loss comes last in a step, after the step is already known
            run.put("late", "Value", 5, 1.0)
            run.flush()
            await until(socket, lambda n: 5 in n.get("run", {}).get("steps", ()))
            run.put("loss", "Metric", 5, 0.25)
            run.flush()
            said = await until(socket, lambda n: n.get("run", {}).get("training"))
            assert said["run"]["training"] == {"loss": [[5], [0.25]]}

    with serving(tmp_path) as page, logged_in(page) as client:
        assert client.get("/api/run?run=r").status_code == 200
        asyncio.run(talk(page))
    run.close()


def test_sends_a_slow_browser_only_the_latest(tmp_path):
    run = Writer(tmp_path, "r")
    run.step(0)
    run.flush()

    async def talk(page):
        async with connected(page) as slow, connected(page) as quick:
            for socket in (slow, quick):
                await send(socket, show="r", version=0, step=0)
            held = await receive(slow)  # not confirmed
            assert held["n"] == 1
            for step in range(1, 5):
                run.step(step)
                run.flush()
                # the quick browser shows when the server has read it
                await until(quick, lambda n, s=step: "run" in n and s in n["run"]["steps"])
            await send(slow, seen=held["n"])
            news = await receive(slow)
            assert news["n"] == 2  # one message for everything in between
            assert news["run"]["steps"][-1] == 4
            assert news["run"]["steps"] == list(range(news["run"]["steps"][0], 5))

    with serving(tmp_path) as page, logged_in(page) as client:
        assert client.get("/api/run?run=r").status_code == 200
        asyncio.run(talk(page))
    run.close()


def test_reports_new_and_deleted_runs(tmp_path):
    first = Writer(tmp_path, "first")
    first.step(0)
    first.close()

    async def talk(page, client):
        async with connected(page) as socket:
            await send(socket, show="first", version=0, step=-1)
            await until(socket, lambda n: "run" in n)
            second = Writer(tmp_path, "second")
            await until(socket, lambda n: n.get("catalog"))
            second.close()
            shown = (await asyncio.to_thread(client.get, "/api/catalog")).json()["entries"]
            assert {s["id"] for s in shown} == {"first", "second"}
            shutil.rmtree(tmp_path / "first")
            news = await until(socket, lambda n: n.get("run", {}).get("state") == "deleted")
            assert "error" not in news["run"]

    with serving(tmp_path) as page, logged_in(page) as client:
        assert client.get("/api/run?run=first").status_code == 200
        asyncio.run(talk(page, client))


def test_reports_a_run_that_was_read_half_deleted(tmp_path):
    """The server refreshes a run while its files are being deleted."""
    run = Writer(tmp_path, "r")
    for step in range(3):
        run.step(step)
    run.close()
    entry = RunEntry(tmp_path / "r")
    subscriber = Subscriber(None)
    subscriber.run, subscriber.step = "r", 2
    catalog = Catalog()
    catalog.add(tmp_path)
    catalog._entries["r"] = entry
    assert run_news(catalog, subscriber)["records"] == len(entry.table())
    for path in sorted((tmp_path / "r" / "records").rglob("*.parquet")):
        path.write_bytes(b"")  # about to go
    refresh_entry(entry)
    shutil.rmtree(tmp_path / "r")
    assert refresh_entry(entry)
    assert run_news(catalog, subscriber)["state"] == "deleted"
    assert len(entry.table().steps()) == 3  # what was read of it stays
    entry._table = None  # without it, the state is reported all the same
    entry._reader = None
    assert run_news(catalog, subscriber)["state"] == "deleted"


def test_disconnects_a_client_that_sends_nonsense(page):
    async def talk():
        async with connected(page) as socket:
            await socket.send("nonsense")
            await asyncio.wait_for(socket.wait_closed(), 60)

    asyncio.run(talk())


def test_reports_the_progress_of_a_comparison(page, client):
    async def talk():
        async with connected(page) as socket:
            await send(socket, show="a", version=0, step=-1)
            await until(socket, lambda n: "run" in n)
            start = "/api/compare/start?run=b&other=a&rtol=0.1"
            job = (await asyncio.to_thread(client.post, start)).json()["job"]
            news = await until(
                socket, lambda n: n.get("jobs", {}).get(job, {}).get("state") == "done"
            )
            assert news["jobs"][job] == {"state": "done"}

    asyncio.run(talk())
