"""Tells browsers what has changed, and only that; a slow one gets the latest, not a queue.

A browser says which run it shows and confirms every message. Until it has, nothing else is sent:
changes are collected, and the next message is composed when it can be sent. Only new points of
the training curves are sent, never their history.
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

from tensortap.core.errors import TensortapError
from tensortap.core.rooms import offers
from tensortap.page.access_control import SUBPROTOCOL
from tensortap.page.catalog import Catalog, CatalogEntry, describe_entry
from tensortap.page.responses import encode_json
from tensortap.table.table import Table

log = logging.getLogger("tensortap")


class BrowserMessage(msgspec.Struct):
    """A message of a browser: the run that it shows, and the versions that it has."""

    show: str | None = None
    version: int = 0
    step: int = -1
    seen: int = 0


class Subscriber:
    """One browser."""

    def __init__(self, socket: WebSocket) -> None:
        self.socket = socket
        self.run = ""  # the id of the entry that it shows
        self.step = -1  # the last step that it knows
        self.version = 0  # the version that it knows
        self.sent_steps: dict[str, int] | None = None  # last step of each curve that it has
        self.changed: set[str] = set()  # ids of entries
        self.catalog_changed = False
        self.jobs: dict[str, Any] = {}
        self.sent = self.seen = 0
        self.wake = asyncio.Event()

    def receive(self, message: BrowserMessage) -> None:
        """Take note of what the browser shows and has seen."""
        if message.show is not None:
            self.run, self.step, self.version = message.show, message.step, message.version
            self.sent_steps = None
            self.changed.add(message.show)
        self.seen = max(self.seen, min(message.seen, self.sent))
        self.wake.set()


class Push:
    """All browsers, and the task that refreshes the entries that they show."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._subscribers: set[Subscriber] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._refreshing: dict[str, asyncio.Task[None]] = {}

    async def serve(self, socket: WebSocket) -> None:
        """Serve one browser until it disconnects."""
        await socket.accept(SUBPROTOCOL)
        subscriber = Subscriber(socket)
        self._loop = asyncio.get_running_loop()
        self._subscribers.add(subscriber)
        loops = (self._receive_loop, self._send_loop)
        tasks = [asyncio.create_task(loop(subscriber)) for loop in loops]
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._subscribers.discard(subscriber)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # already closed
                await socket.close()

    def report_job(self, id: str, state: Any) -> None:  # noqa: A002
        """Send the state of a job to all browsers; callable from any thread."""

        def note() -> None:
            for subscriber in self._subscribers:
                subscriber.jobs[id] = state
                subscriber.wake.set()

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(note)

    async def _receive_loop(self, subscriber: Subscriber) -> None:
        while True:
            try:
                text = await subscriber.socket.receive_text()
                message = msgspec.json.decode(text, type=BrowserMessage)
            except (WebSocketDisconnect, msgspec.MsgspecError, KeyError):
                return  # disconnected, or not our page
            subscriber.receive(message)

    async def _send_loop(self, subscriber: Subscriber) -> None:
        while True:
            await subscriber.wake.wait()
            subscriber.wake.clear()
            is_news = subscriber.changed or subscriber.catalog_changed or subscriber.jobs
            if not is_news or subscriber.seen < subscriber.sent:
                continue
            changed, subscriber.changed = subscriber.changed, set()
            jobs, subscriber.jobs = subscriber.jobs, {}
            catalog, subscriber.catalog_changed = subscriber.catalog_changed, False
            news = await run_in_threadpool(self._entry_news, subscriber, changed)
            news |= {key: value for key, value in (("jobs", jobs), ("catalog", catalog)) if value}
            if news:
                subscriber.sent += 1
                try:
                    text = encode_json({"n": subscriber.sent, **news}).decode()
                    await subscriber.socket.send_text(text)
                except (WebSocketDisconnect, RuntimeError, OSError):
                    return

    def _entry_news(self, subscriber: Subscriber, changed: set[str]) -> dict[str, Any]:
        """Return what a browser does not know yet of the entries that changed."""
        run = run_news(self._catalog, subscriber) if subscriber.run in changed else None
        others = changed - {subscriber.run}
        entries = [describe_entry(e) for e in self._catalog.entries() if e.id in others]
        return {key: value for key, value in (("run", run), ("others", entries)) if value}

    async def _watch(self) -> None:
        """Look for changes as long as there are subscribers."""
        rounds = 0
        while self._subscribers:
            for entry in self._catalog.recently_used():
                # one task per entry: a session that does not answer must not delay the others
                if entry.id not in self._refreshing:
                    self._refreshing[entry.id] = asyncio.create_task(self._refresh(entry))
            if rounds % 8 == 0 and await run_in_threadpool(self._catalog.scan):
                for subscriber in self._subscribers:
                    subscriber.catalog_changed = True
                    subscriber.wake.set()
            rounds += 1
            await asyncio.sleep(0.25)

    async def _refresh(self, entry: CatalogEntry) -> None:
        try:
            if await run_in_threadpool(refresh_entry, entry):
                for subscriber in self._subscribers:
                    subscriber.changed.add(entry.id)
                    subscriber.wake.set()
        finally:
            del self._refreshing[entry.id]


def refresh_entry(entry: CatalogEntry) -> bool:
    """Refresh an entry; return whether it changed. A broken run must not affect the others."""
    try:
        return entry.refresh()
    except Exception as error:
        log.warning("tensortap: cannot follow %s: %s", entry.title, error)
        return False


def run_news(catalog: Catalog, subscriber: Subscriber) -> dict[str, Any] | None:
    """Return what a browser does not know yet of the run that it shows."""
    try:
        entry = catalog.get(subscriber.run)
    except TensortapError as error:
        return {"id": subscriber.run, "error": str(error)}
    try:
        table = entry.table()
        if entry.version == subscriber.version:
            return None
        with table.lock:
            return _table_news(entry, table, subscriber)
    except (TensortapError, OSError) as error:
        return {**describe_entry(entry), "error": str(error)}


def _table_news(entry: CatalogEntry, table: Table, subscriber: Subscriber) -> dict[str, Any]:
    steps = table.steps()
    new = steps[steps > subscriber.step]
    is_unknown = subscriber.step >= 0 and not (steps == subscriber.step).any()
    reset = len(new) > 2000 or is_unknown  # the browser must request everything again
    points = {} if reset else _new_points(table, subscriber)
    if len(steps):
        subscriber.step = int(steps[-1])
    subscriber.version = entry.version
    news = {**describe_entry(entry), "names": len(table.index().names), "records": table.records()}
    return {**news, "reset": reset, "steps": [] if reset else new, "training": points}


def _new_points(table: Table, subscriber: Subscriber) -> dict[str, Any]:
    curves = {
        name: line for curves in offers("page.curves") for name, line in curves(table).items()
    }
    if subscriber.sent_steps is None:
        # the loss comes last in a step: that of the step that it knows may be missing
        subscriber.sent_steps = dict.fromkeys(curves, subscriber.step - 1)
    points = {}
    for name, (steps, values) in curves.items():
        new = steps > subscriber.sent_steps.get(name, -(1 << 62))
        if new.any():
            finite = [float(v) if np.isfinite(v) else None for v in values[new]]
            points[name] = [steps[new], finite]
            subscriber.sent_steps[name] = int(steps[-1])
    return points
