"""The page of a compacted run reads little of it, and offers to compact a large one."""

from __future__ import annotations

import json
import time

import pytest

import tensortap as tap
from tensortap.core.rooms import load, rooms
from tensortap.page.routes import ROUTES
from tensortap.table.table import Table
from tests.compact.test_compact import plain, run, small_windows
from tests.page.conftest import logged_in, serving
from tests.page.test_page import CHROMIUM, Tab, chromium

assert chromium
assert plain
assert run
assert small_windows


def routes():
    found = list(ROUTES)
    for room in rooms().values():
        found += load(room.routes) if room.routes is not None else ()
    return [each.name for each in found if each.method == "GET"]


def answers(path):
    """Return what the page says about a run, and whether it read all rows for that."""
    found = {}
    with serving(path) as page, logged_in(page) as client:
        (entry,) = page.catalog.entries()
        entry.complete()
        for name in routes():
            parameters = {"run": entry.id, "kind": "Activation", "name": "a", "step": 3}
            answer = client.get(f"/api/{name}", params=parameters)
            assert answer.status_code in (200, 400, 404, 410, 413, 422), (name, answer.text)
            found[name] = answer.status_code, answer.text
        return found, entry.table()


def test_the_page_says_the_same_and_reads_little(run, plain):
    tap.open(run).compact()
    (one, _), (other, table) = answers(plain), answers(run)
    assert not table._is_read, "the page has read all rows of a compacted run"
    for name in ("run", "overview", "lines", "exponents", "tensors", "alerts", "ranks", "summary"):
        if name not in one:
            continue
        first, second = (json.loads(each[name][1]) for each in (one, other))
        for answer in (first, second):
            for key in ("id", "title", "where", "version", "started", "seconds"):
                answer.pop(key, None)
        assert first == second, name


def test_compacts_in_a_process_of_its_own(run):
    with serving(run) as page, logged_in(page) as client:
        (entry,) = page.catalog.entries()
        assert client.get("/api/compact", params={"run": entry.id}).json() == {"windows": 0}
        started = client.post("/api/compact/start", params={"run": entry.id})
        assert started.json()["state"] == "running", started.text
        deadline = time.monotonic() + 60
        while client.get("/api/compact", params={"run": entry.id}).json() == {"windows": 0}:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert entry.table().compacted()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium, which make test installs")
@pytest.mark.slow
def test_the_page_offers_it_for_large_runs(run, chromium, monkeypatch):
    monkeypatch.setattr(Table, "records", lambda table: 1_000_001)
    with serving(run) as page, Tab(chromium, page, "#tab=receipt") as tab:
        tab.page.get_by_role("button", name="Compact").click()
        tab.page.get_by_text("sorted into").wait_for(timeout=60_000)
    assert tap.open(run).reader.windows
