"""Recorders for tests of workers: they write what they get to a file."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import tensortap as tap


class Notes:
    """A recorder that writes one line per record, and one at the end."""

    def __init__(self, path, slow=0.0):
        self.path = Path(path)
        self.slow = slow

    def __call__(self, record):
        time.sleep(self.slow)
        array = tap.rooms.watch.array_of(record)
        value = record.value
        if array is not None:
            value = array.astype(float).tolist() if array.size <= 64 else float(array.sum())
        self.write(
            name=record.name, kind=record.kind.value, step=record.step, call=record.call,
            rank=record.rank, dtype=record.dtype, shape=list(record.shape), tags=record.tags,
            type=record.type, value=value, pid=os.getpid(),
        )  # fmt: skip

    def write(self, **line):
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self):
        self.write(closed=os.getpid())

    # -- in the test -----------------------------------------------------------------------

    @property
    def all(self):
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    @property
    def records(self):
        return [line for line in self.all if "name" in line]

    @property
    def closed(self):
        """The process ids of workers that have closed their files."""
        return [line["closed"] for line in self.all if "closed" in line]

    def of(self, name, kind=None):
        return [r for r in self.records if r["name"] == name and kind in (None, r["kind"])]

    @property
    def names(self):
        return sorted({r["name"] for r in self.records})


class Trouble(Notes):
    """A recorder that fails in various ways at records of some names."""

    def __call__(self, record):
        if record.name.startswith("raises"):
            raise ValueError(f"no good: {record.step}")
        if record.name == "exits":
            os._exit(7)
        if record.name == "leaves":
            raise SystemExit("enough")
        if record.name == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if record.name == "hangs":
            self.write(hangs=True)
            time.sleep(1000)
        super().__call__(record)


class Patient(Notes):
    """A recorder that waits for a file before each record."""

    def __call__(self, record):
        while not self.path.with_name("go").exists():
            time.sleep(0.02)
        super().__call__(record)


def note(record):
    """Write a record to the file that the environment names."""
    Notes(os.environ["NOTES"])(record)


def note_the_end():
    Notes(os.environ["NOTES"]).close()
