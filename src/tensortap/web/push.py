"""Tells browsers what has changed, and only that; a slow one gets the latest, not a queue.

A browser says which run it shows and confirms every message. Until it has, nothing else is sent:
what changes meanwhile is gathered, and the next message is made when it can be taken, of what is
true then. History is never sent: of the curve of the loss only the points that are new.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.websockets import WebSocket, WebSocketDisconnect

from tensortap.errors import TensortapError
from tensortap.table.table import Table
from tensortap.web.catalog import Library
from tensortap.web.curves import curves
from tensortap.web.entries import Shown, described
from tensortap.web.responses import as_json

log = logging.getLogger("tensortap")

INTERVAL = 0.25  # seconds between two looks at what is shown
_SCAN = 8  # looks between two searches for new runs
_POINTS = 2000  # new points of a curve that are sent; of more the browser asks for the curve


class Showing(msgspec.Struct):
    """What a browser says: which run it shows and how much it knows of it; what it has seen."""

    show: str | None = None
    version: int = 0
    step: int = -1
    seen: int = 0


_said = msgspec.json.Decoder(Showing)


class Listener:
    """One browser."""

    def __init__(self, socket: WebSocket) -> None:
        self.socket = socket
        self.shows = ""
        self.step = -1  # the last that it knows of what it shows
        self.known = 0  # the version that it knows
        self.told: dict[str, int] | None = None  # of each curve, up to which step it has it
        self.changed: set[str] = set()
        self.library = False  # whether runs have come
        self.jobs: dict[str, Any] = {}
        self.sent = self.seen = 0
        self.wake = asyncio.Event()

    @property
    def due(self) -> bool:
        """Whether there is news, and the last has been seen."""
        news = self.changed or self.library or self.jobs
        return bool(news) and self.seen >= self.sent


class Push:
    """All browsers, and the one task that looks for what is new."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._listeners: set[Listener] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._looking: dict[str, asyncio.Task[None]] = {}

    async def talk(self, socket: WebSocket) -> None:
        """Serve one browser for as long as it listens."""
        await socket.accept()
        listener = Listener(socket)
        self._loop = asyncio.get_running_loop()
        self._listeners.add(listener)
        tasks = [asyncio.create_task(part(listener)) for part in (self._hear, self._tell)]
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
            self._watching.add_done_callback(_report)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._listeners.discard(listener)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it was closed there
                await socket.close()

    def job(self, id: str, state: Any) -> None:  # noqa: A002  what it is called in the page
        """Tell how far a piece of work is; from any thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return

        def note() -> None:
            for listener in self._listeners:
                listener.jobs[id] = state
                listener.wake.set()

        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(note)

    async def _hear(self, listener: Listener) -> None:
        while True:
            try:
                said = _said.decode(await listener.socket.receive_text())
            except WebSocketDisconnect:
                return
            except (msgspec.MsgspecError, KeyError):
                return  # nothing that our page says
            if said.show is not None:
                listener.shows, listener.step, listener.known = said.show, said.step, said.version
                listener.told = None
                listener.changed.add(said.show)
            listener.seen = max(listener.seen, min(said.seen, listener.sent))
            listener.wake.set()

    async def _tell(self, listener: Listener) -> None:
        while True:
            await listener.wake.wait()
            listener.wake.clear()
            if not listener.due:
                continue
            changed, listener.changed = listener.changed, set()
            jobs, listener.jobs = listener.jobs, {}
            news: dict[str, Any] = {"jobs": jobs} if jobs else {}
            if listener.library:
                news["library"], listener.library = True, False
            for id in changed:  # noqa: A001
                if id == listener.shows:
                    said = await run_in_threadpool(_news_of, self._library, listener)
                    if said is not None:
                        news["run"] = said
            others = [i for i in changed if i != listener.shows]
            if others:
                news["others"] = await run_in_threadpool(self._described, others)
            if not news:
                continue
            listener.sent += 1
            try:
                text = as_json({"n": listener.sent, **news}).decode()
                await listener.socket.send_text(text)
            except (WebSocketDisconnect, RuntimeError, OSError):
                return

    def _described(self, ids: list[str]) -> list[dict[str, Any]]:
        found = {shown.id: shown for shown in self._library.all()}
        return [described(found[id]) for id in ids if id in found]  # noqa: A001

    async def _look_at(self, shown: Shown) -> None:
        try:
            if await run_in_threadpool(_look, shown):
                for listener in self._listeners:
                    listener.changed.add(shown.id)
                    listener.wake.set()
        finally:
            del self._looking[shown.id]

    async def _watch(self) -> None:
        """Look for what is new while anybody listens."""
        looks = 0
        while self._listeners:
            for shown in self._library.in_use():
                # each by itself: a session that does not answer must not hold up the others
                if shown.id not in self._looking:
                    self._looking[shown.id] = asyncio.create_task(self._look_at(shown))
            if looks % _SCAN == 0 and await run_in_threadpool(self._library.scan):
                for listener in self._listeners:
                    listener.library = True
                    listener.wake.set()
            looks += 1
            await asyncio.sleep(INTERVAL)


def _look(shown: Shown) -> bool:
    try:
        return shown.look()
    except Exception as error:
        # a run that somebody breaks while it is shown must not end the others
        log.warning("tensortap: %s cannot be followed: %s", shown.title, error)
        return False


def _news_of(library: Library, listener: Listener) -> dict[str, Any] | None:
    """What a browser does not know yet of the run that it shows."""
    try:
        shown = library.get(listener.shows)
    except TensortapError as error:
        return {"id": listener.shows, "error": str(error)}
    try:
        table = shown.table()
        if shown.version == listener.known:
            return None
        with table.lock:
            return _news(shown, table, listener)
    except (TensortapError, OSError) as error:
        return {**described(shown), "error": str(error)}


def _news(shown: Shown, table: Table, listener: Listener) -> dict[str, Any]:
    steps = table.steps()
    fresh = steps[steps > listener.step]
    # the step that it knows is not there, or too much is new: it has to ask for all of it
    reset = len(fresh) > _POINTS or (listener.step >= 0 and not (steps == listener.step).any())
    training = {}
    if not reset:
        found = curves(table)
        if listener.told is None:
            # a step is known with its first record, and its loss comes last
            listener.told = dict.fromkeys(found, listener.step - 1)
        for name, (at, values) in found.items():
            new = at > listener.told.get(name, -(1 << 62))
            if new.any():
                training[name] = [at[new], _plain(values[new])]
                listener.told[name] = int(at[-1])
    if len(steps):
        listener.step = int(steps[-1])
    listener.known = shown.version
    said = {**described(shown), "names": len(table.names), "records": len(table), "reset": reset}
    return {**said, "steps": [] if reset else fresh, "training": training}


def _plain(values: Any) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in values]


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("tensortap: the page is no longer told of news: %s", task.exception())
