"""Create the folder of a run, one for all ranks, and file names for any name."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from tensortap._version import __version__
from tensortap.core.errors import TensortapError
from tensortap.core.files import folder_mode
from tensortap.runs import layout

log = logging.getLogger("tensortap")

_LONGEST_NAME = 180  # bytes, so that a rank and a number still fit
_REQUEST_TIMEOUT = 30.0  # seconds a rank waits for the answer of rank 0
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "JAX_COORDINATOR_ADDRESS", "WORLD_SIZE",
)  # fmt: skip


def file_name(name: str) -> str:
    """Return a file name for any name: the name itself if possible, never the same for two names.

    >>> file_name("blocks/3.attn"), file_name("loss")
    ('blocks%2F3.attn', 'loss')
    """
    safe = "".join(c if _is_plain(c) else _escaped(c) for c in name)
    if safe.startswith("."):  # neither a hidden file nor the parent folder
        safe = f"%2E{safe[1:]}"
    if len(safe.encode()) <= _LONGEST_NAME and safe:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    shortened = safe.encode()[: _LONGEST_NAME - 18].decode("utf-8", "ignore")
    return f"{shortened}%~{digest}"


def _is_plain(c: str) -> bool:
    return (c.isalnum() or c in "._-+=@,()[] #&!'~" or ord(c) > 0x2000) and c.isprintable()


def _escaped(c: str) -> str:
    return "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))


def make_run(base: Path, world_size: int) -> Path:
    """Create a run folder in `base`, named after the local time."""
    now = datetime.now().astimezone()
    stem = now.strftime("%Y%m%d_%H%M%S")
    number = 1
    run = base / stem
    with _creating(base):
        base.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                run.mkdir(mode=folder_mode())
                break
            except FileExistsError:
                number += 1
                run = base / f"{stem}_{number}"
    info = layout.RunInfo(
        format=layout.VERSION,
        id=secrets.token_hex(8),
        tensortap=__version__,
        world_size=world_size,
        started=now.isoformat(),
        time_zone=str(now.tzinfo),
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    layout.write_json(run / layout.RUN_FILE, msgspec.to_builtins(info))
    return run


@contextlib.contextmanager
def _creating(base: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TensortapError(f"cannot create a run in {base}: {error.strerror}") from error


def end_run(run: Path, crashed: str = "") -> None:
    """Note in run.json that the run has ended, and by which exception if there was one."""
    update_info(run, ended=datetime.now().astimezone().isoformat(), crashed=crashed)


def update_info(run: Path, **changes: Any) -> None:
    """Change some entries of run.json."""
    # a full disk, or a run that the user has removed, is no reason to stop training
    with contextlib.suppress(OSError, TensortapError):
        changed = msgspec.structs.replace(layout.read_info(run), **changes)
        layout.write_json(run / layout.RUN_FILE, msgspec.to_builtins(changed))


def shared_run(base: Path, rank: int, world_size: int, job: str) -> Path:
    """Return the run folder that all ranks of a job share; rank 0 creates it.

    The ranks exchange files: each one sends a request with a random token, so that it cannot take
    an answer to an older job for its own.
    """
    if world_size == 1:
        return make_run(base, 1)
    exchange = base / f".meeting-{hashlib.sha256(job.encode()).hexdigest()[:12]}"
    with _creating(base):
        exchange.mkdir(parents=True, exist_ok=True)
    if rank != 0:
        return _request(base, exchange, rank, world_size)
    run = make_run(base, world_size)
    threading.Thread(
        target=_answer, args=(exchange, run.name, world_size), daemon=True, name="tensortap-meeting"
    ).start()
    return run


def _request(base: Path, exchange: Path, rank: int, world_size: int) -> Path:
    request = exchange / f"{rank}-{secrets.token_hex(8)}.ask"
    answer = request.with_suffix(".run")
    request.touch()
    deadline = time.monotonic() + _REQUEST_TIMEOUT
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                # list first: network file systems cache that a file does not exist
                os.listdir(exchange)
                return base / answer.read_text()
            time.sleep(0.02)
    finally:
        for path in (request, answer):
            path.unlink(missing_ok=True)
    log.warning(
        "tensortap: rank 0 did not name the run within %.0f s (do the machines share %s?); "
        "rank %d creates a run of its own",
        _REQUEST_TIMEOUT, base, rank,
    )  # fmt: skip
    return make_run(base, world_size)


def _answer(exchange: Path, name: str, world_size: int) -> None:
    deadline = time.monotonic() + 600  # a rank may come late
    answered: set[str] = set()
    while len(answered) < world_size - 1 and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for request in exchange.glob("*.ask"):
                draft = request.with_suffix(".draft")
                draft.write_text(name)
                draft.replace(request.with_suffix(".run"))
                request.unlink(missing_ok=True)
                answered.add(request.name.partition("-")[0])
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        # if a rank is still reading after this, the folder stays for the next job
        for _ in range(100):
            if not os.listdir(exchange):
                break
            time.sleep(0.05)
        exchange.rmdir()


def job_name() -> str:
    """Return a text that is the same for all ranks of a job, and different for other jobs."""
    return "\n".join(f"{name}={os.environ.get(name, '')}" for name in _JOB_VARIABLES)
