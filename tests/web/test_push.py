"""What browsers are told by themselves: what is new, once, and the latest to those who are slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil

import websockets

from tensortap.web.catalog import Library
from tensortap.web.entries import ShownRun
from tensortap.web.push import Listener, _look, _news_of
from tests.web.conftest import Writer, cookie_of, entered, serving


@contextlib.asynccontextmanager
async def listening(page):
    where = f"ws://127.0.0.1:{page.port}/push"
    async with websockets.connect(
        where, additional_headers={"cookie": cookie_of(page)}, proxy=None
    ) as socket:
        yield socket


async def hear(socket, seconds=60):
    return json.loads(await asyncio.wait_for(socket.recv(), seconds))


async def say(socket, **words):
    await socket.send(json.dumps(words))


async def until(socket, wanted):
    """The news, message by message, until some are as wanted."""
    while True:
        news = await hear(socket)
        await say(socket, seen=news["n"])
        if wanted(news):
            return news


def test_only_what_is_new_is_told(tmp_path):
    run = Writer(tmp_path, "r")
    for step in range(3):
        run.step(step)
    run.flush()

    async def talk(page):
        async with listening(page) as socket:
            await say(socket, show="r", version=0, step=2)
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
            assert told == [2, 3, 4]  # and the one at which it may have been cut off
            assert seen == [3, 4]
            # a step is known with its first record; its loss comes last, and is told as well
            run.put("late", "Value", 5, 1.0)
            run.flush()
            await until(socket, lambda n: 5 in n.get("run", {}).get("steps", ()))
            run.put("loss", "Metric", 5, 0.25)
            run.flush()
            said = await until(socket, lambda n: n.get("run", {}).get("training"))
            assert said["run"]["training"] == {"loss": [[5], [0.25]]}

    with serving(tmp_path) as page, entered(page) as client:
        assert client.get("/api/run?run=r").status_code == 200
        asyncio.run(talk(page))
    run.close()


def test_who_is_slow_gets_the_latest_not_a_queue(tmp_path):
    run = Writer(tmp_path, "r")
    run.step(0)
    run.flush()

    async def talk(page):
        async with listening(page) as slow, listening(page) as quick:
            for socket in (slow, quick):
                await say(socket, show="r", version=0, step=0)
            held = await hear(slow)  # and is not confirmed
            assert held["n"] == 1
            for step in range(1, 13):
                run.step(step)
                run.flush()
                # the quick one tells when the server has seen it
                await until(quick, lambda n, s=step: "run" in n and s in n["run"]["steps"])
            await say(slow, seen=held["n"])
            news = await hear(slow)
            assert news["n"] == 2  # all that came meanwhile is one message
            assert news["run"]["steps"][-1] == 12
            assert news["run"]["steps"] == list(range(news["run"]["steps"][0], 13))

    with serving(tmp_path) as page, entered(page) as client:
        assert client.get("/api/run?run=r").status_code == 200
        asyncio.run(talk(page))
    run.close()


def test_a_run_that_comes_and_one_that_goes(tmp_path):
    import shutil

    first = Writer(tmp_path, "first")
    first.step(0)
    first.close()

    async def talk(page, client):
        async with listening(page) as socket:
            await say(socket, show="first", version=0, step=-1)
            await until(socket, lambda n: "run" in n)
            second = Writer(tmp_path, "second")
            await until(socket, lambda n: n.get("library"))
            second.close()
            shown = (await asyncio.to_thread(client.get, "/api/library")).json()["shown"]
            assert {s["id"] for s in shown} == {"first", "second"}
            shutil.rmtree(tmp_path / "first")
            news = await until(socket, lambda n: n.get("run", {}).get("state") == "gone")
            assert "error" not in news["run"]

    with serving(tmp_path) as page, entered(page) as client:
        assert client.get("/api/run?run=first").status_code == 200
        asyncio.run(talk(page, client))


def test_a_run_that_is_seen_half_deleted(tmp_path):
    """Somebody looks while its files go, one after the other."""
    run = Writer(tmp_path, "r")
    for step in range(3):
        run.step(step)
    run.close()
    shown = ShownRun("r", tmp_path / "r")
    listener = Listener(None)
    listener.shows, listener.step = "r", 2
    library = Library()
    library.add(tmp_path)
    library._shown["r"] = shown
    assert _news_of(library, listener)["records"] == len(shown.table())
    for path in sorted((tmp_path / "r" / "records").rglob("*.parquet")):
        path.write_bytes(b"")  # about to go
    _look(shown)
    shutil.rmtree(tmp_path / "r")
    assert _look(shown)
    assert _news_of(library, listener)["state"] == "gone"
    assert len(shown.table().steps()) == 3  # what was read of it is still there
    shown._table = None  # and where it is not, that the run has gone is said all the same
    shown._reader = None
    assert _news_of(library, listener)["state"] == "gone"


def test_who_talks_nonsense_is_hung_up_on(page):
    async def talk():
        async with listening(page) as socket:
            await socket.send("nonsense")
            await asyncio.wait_for(socket.wait_closed(), 60)

    asyncio.run(talk())


def test_how_far_a_comparison_is_comes_by_itself(page, client):
    async def talk():
        async with listening(page) as socket:
            await say(socket, show="a", version=0, step=-1)
            await until(socket, lambda n: "run" in n)
            start = "/api/compare/start?run=b&other=a&rtol=0.1"
            job = (await asyncio.to_thread(client.post, start)).json()["job"]
            news = await until(
                socket, lambda n: n.get("jobs", {}).get(job, {}).get("state") == "done"
            )
            assert news["jobs"][job] == {"state": "done"}

    asyncio.run(talk())
