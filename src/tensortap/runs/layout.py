"""Paths of the files of a run, and its run.json. docs/format.md describes the format."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from tensortap.core.errors import TensortapError
from tensortap.core.files import CorruptFile, file_mode, plain, read_small

VERSION = 1
_LARGEST_JSON = 8 << 20  # bytes; in memory it may take 25 times as much
_LARGEST_INFO = 1 << 20  # bytes of run.json
RUN_FILE = "run.json"
TAIL = "tail.arrows"
_RANK = re.compile(r"\d{5,}")


class NotARun(TensortapError):
    """A folder that is not a run, or whose format is newer than this version reads."""


class RunInfo(msgspec.Struct, frozen=True):
    """The content of run.json."""

    format: int
    id: str
    tensortap: str
    world_size: int
    started: str
    time_zone: str
    ended: str | None = None
    crashed: str = ""  # the type of the exception that ended the program
    host: str = ""  # where its process runs, and which it is
    pid: int = 0
    name: str = ""
    notes: str = ""
    config: dict[str, Any] = {}


def run_state(info: RunInfo, last_written: float) -> str:
    """Return training, ended or crashed; silent if that cannot be known from here.

    A run has crashed if an exception ended its program, or if its process is gone. On another
    machine, a run to which nothing was written for an hour is silent.
    """
    if info.ended is not None:
        return "crashed" if info.crashed else "ended"
    if info.pid and info.host == socket.gethostname():
        try:
            os.kill(info.pid, 0)
        except ProcessLookupError:
            return "crashed"
        except PermissionError:
            pass  # of another user
        return "training"
    return "training" if time.time() - last_written < 3600 else "silent"


def rank_name(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"{rank:05d}"


def records_folder(run: Path, rank: int) -> Path:
    """Return the folder with the tables of a rank."""
    return run / "records" / rank_name(rank)


def receipt_file(run: Path, rank: int) -> Path:
    """Return the file into which a rank writes its receipt when it ends."""
    return records_folder(run, rank) / "receipt.json"


def ranks_of(run: Path) -> list[int]:
    """Return the ranks that have written into a run."""
    folder = run / "records"
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if _RANK.fullmatch(p.name))


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically: a reader sees the old content or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file_mode()), "w") as out:
        out.write(text)
    draft.replace(path)


def read_json(run: Path, path: str | Path) -> Any:
    """Return the content of a JSON file of a run, or None if it does not exist or is damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError, CorruptFile):
        return json.loads(read_small(run, path, _LARGEST_JSON))
    return None


def read_info(run: Path) -> RunInfo:
    """Return the content of run.json; raise NotARun if this version cannot read the run."""
    try:
        text = read_small(run, RUN_FILE, _LARGEST_INFO).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        runs = sorted(path.parent.name for path in run.glob(f"*/{RUN_FILE}"))
        hint = f"; it contains {len(runs):,} runs, the latest is {run / runs[-1]}" if runs else ""
        raise NotARun(f"{run} is not a run: it has no {RUN_FILE}{hint}") from None
    try:
        version = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NotARun(f"{run / RUN_FILE} is damaged and cannot be read") from None
    if not isinstance(version, int) or version > VERSION:
        raise NotARun(
            f"{run} has format {plain(str(version), 20)}, but this tensortap reads only up to "
            f"{VERSION}: upgrade tensortap"
        )
    try:
        info = msgspec.json.decode(text, type=RunInfo)
    except msgspec.MsgspecError as error:
        raise NotARun(f"{run / RUN_FILE} cannot be read: {plain(str(error))}") from None
    texts = ((name, getattr(info, name)) for name in RunInfo.__struct_fields__)
    shown = {name: plain(text) for name, text in texts if isinstance(text, str)}
    return msgspec.structs.replace(info, **shown)
