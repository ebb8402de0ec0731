"""Runs as a training leaves them, and a served page over them."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys

import httpx
import numpy as np
import pytest

from tensortap.alerts.alert import Alert, record_of
from tensortap.capture.queue import Queue
from tensortap.capture.ticket import Ticket
from tensortap.core.record import Kind, Record
from tensortap.page.catalog import Catalog
from tensortap.page.server import Page
from tensortap.runs.folders import end_run, make_run, update_info
from tensortap.runs.sink import StoreSink
from tensortap.stats import summarize_array
from tensortap.values.snapshot import borrow

get = functools.partial(httpx.get, verify=False)  # else it loads certificates for each request
HOSTILE = "<img src=x onerror=alert(1)><b>'\"&😀"
LAYERS = [
    "embed",
    "blocks.0.attn",
    "blocks.0.mlp",
    "blocks.1.attn",
    "blocks.1.mlp",
    "head",
    HOSTILE,
]
STEPS = 30


@pytest.fixture(autouse=True)
def no_live_session(monkeypatch, isolated_settings):
    monkeypatch.setenv("TENSORTAP_SERVER", "127.0.0.1:1")


class Writer:
    """Writes a run record by record, as a training does."""

    def __init__(self, folder, name=None, rank=0, world_size=1):
        if rank == 0:
            self.run = make_run(folder, world_size)
            if name is not None:
                self.run = self.run.rename(folder / name)
        else:
            self.run = folder / name
        self.rank, self.world_size, self.seq = rank, world_size, 0
        self.sink = Queue(StoreSink(self.run, rank), budget=1 << 31, overflow="block", name="t")

    def put(self, name, kind, step, value=None, stats=None, dtype="", shape=(), tags=None):
        if isinstance(value, np.ndarray):
            dtype, shape = str(value.dtype), value.shape
        record = Record(
            name, Kind(kind), step, 0, self.seq, self.rank, self.world_size, self.seq, "", dtype,
            shape, None, None, None if value is None else borrow(value), stats, tags or {},
        )  # fmt: skip
        self.sink.write(record, Ticket(1), 0)
        self.seq += 1

    def alert(self, name, kind, step, message="holds NaN", rule="nan"):
        made = Alert(rule, name, Kind(kind), step, 0, name, message, origin="embed")
        self.sink.write(record_of(made, seq=self.seq, time_ns=self.seq), Ticket(1), 0)
        self.seq += 1

    def step(self, step, layers=LAYERS, scale=1.0, keep=("head",)):
        """Write one step: statistics of all layers, tensors of some, the loss."""
        random = np.random.default_rng(step)
        for number, name in enumerate(layers):
            for kind in ("Activation", "Gradient"):
                x = (random.standard_normal((16, 24)) * 2.0**-number * scale).astype("f4")
                if name == "blocks.1.mlp" and step == 20 and kind == "Gradient":
                    x[3, 4] = np.nan
                    self.alert(name, kind, step)
                whole = x if name in keep and kind == "Activation" else None
                self.put(name, kind, step, whole, summarize_array(x), "float32", x.shape)
        self.put("loss", "Metric", step, float(3.0 / (1 + step)))

    def flush(self):
        assert self.sink.flush(60)

    def close(self, end=True):
        self.sink.close(60)
        if end:
            end_run(self.run)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder: two runs that differ from step 12 on, an empty run, and one of raw values."""
    folder = tmp_path_factory.mktemp("runs")
    for name, wrong in (("a", 1.0), ("b", 1.5)):
        run = Writer(folder, name)
        config = {"lr": 3e-4 * wrong, "optimizer": {"name": "adamw"}}
        update_info(run.run, name=f"try {name}", notes="<b>not bold</b>", config=config)
        for step in range(STEPS):
            run.step(step, scale=wrong if step >= 12 else 1.0)
        run.close()
    Writer(folder, "empty").close()
    raw = Writer(folder, "raw")
    big = np.linspace(-1, 1, 4096 * 4096, dtype="f4").reshape(4096, 4096)
    big[1234, 3210] = np.nan
    big[4000, 17] = np.inf
    raw.put("big", "Value", 0, big)
    for step in range(3):
        raw.put("cube", "Value", step, np.arange(24, dtype="i4").reshape(2, 3, 4) + 100 * step)
    raw.put("seven", "Value", 0, np.arange(128, dtype="f4").reshape((2,) * 7))
    raw.put("nothing", "Value", 0, np.zeros((0, 5), "f4"))
    raw.put("number", "Value", 0, np.array(2.5))
    raw.put("words", "Value", 0, "just text")
    raw.put("pair", "Value", 0, {"q": np.ones((2, 2)), "k": np.zeros(3)})
    raw.close()
    killed = Writer(folder, "killed")
    killed.step(0)
    killed.close(end=False)
    update_info(killed.run, pid=dead_process())
    return folder


def dead_process():
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@contextlib.contextmanager
def serving(*what):
    """Serve a page over runs and sessions on a free port."""
    catalog = Catalog()
    for each in what:
        catalog.add(each)
    page = Page(catalog, port=0)
    try:
        yield page
    finally:
        page.close()


@pytest.fixture(scope="session")
def page(runs):
    with serving(runs) as page:
        yield page


def enter(page):
    """Exchange a token; return the headers that later requests need."""
    answer = get(page.url)
    assert answer.status_code == 200
    key = re.search(r'data-key="([^"]+)"', answer.text)[1]
    return {"cookie": answer.headers["set-cookie"].split(";")[0], "x-tensortap-key": key}


@contextlib.contextmanager
def logged_in(page):
    """Return a client that has exchanged a token."""
    with httpx.Client(
        base_url=page.address, timeout=60, headers=enter(page), verify=False
    ) as client:
        yield client


@pytest.fixture
def client(page):
    with logged_in(page) as client:
        yield client
