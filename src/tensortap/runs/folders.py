"""Making the folder of a run, one for all ranks, and file names for any name."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from datetime import datetime
from pathlib import Path

import msgspec

from tensortap._version import __version__
from tensortap.errors import TensortapError
from tensortap.runs import layout

log = logging.getLogger("tensortap")

_LONGEST = 180  # bytes of a file name, with room for rank and number
_ASK = 60.0  # seconds a rank waits for the word of rank 0
_ANSWER = 600.0  # seconds rank 0 listens for the others


def file_name(name: str) -> str:
    """A file name for any name, the same name for plain ones; no two names share one.

    >>> file_name("blocks/3.attn"), file_name("loss")
    ('blocks%2F3.attn', 'loss')
    """
    safe = "".join(c if _plain(c) else _escaped(c) for c in name)
    if safe.startswith("."):  # no hidden file, and no parent folder
        safe = f"%2E{safe[1:]}"
    if len(safe.encode()) <= _LONGEST and safe:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    cut = safe.encode()[: _LONGEST - 18].decode("utf-8", "ignore")
    return f"{cut}%~{digest}"


def _plain(c: str) -> bool:
    return (c.isalnum() or c in "._-+=@,()[] #&!'~" or ord(c) > 0x2000) and c.isprintable()


def _escaped(c: str) -> str:
    return "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))


def make_run(base: Path, world_size: int) -> Path:
    """A new run folder below `base`, named after the local time."""
    now = datetime.now().astimezone()
    stem = now.strftime("%Y%m%d_%H%M%S")
    number = 1
    try:
        base.mkdir(parents=True, exist_ok=True)
        while True:
            run = base / (stem if number == 1 else f"{stem}_{number}")
            try:
                run.mkdir()
                break
            except FileExistsError:
                number += 1
    except OSError as error:
        raise TensortapError(f"cannot make a run in {base}: {error.strerror}") from None
    info = layout.RunInfo(
        format=layout.VERSION,
        id=secrets.token_hex(8),
        tensortap=__version__,
        world_size=world_size,
        started=now.isoformat(),
        time_zone=str(now.tzinfo),
    )
    layout.write_json(run / layout.RUN_FILE, msgspec.to_builtins(info))
    return run


def end_run(run: Path, world_size: int | None = None) -> None:
    """Say in run.json that the run has ended."""
    # a disk that is full, or the user has removed the run: no reason to stop a training
    with contextlib.suppress(OSError, layout.NotARun):
        info = layout.read_info(run)
        ended = datetime.now().astimezone().isoformat()
        done = msgspec.structs.replace(info, ended=ended, world_size=world_size or info.world_size)
        layout.write_json(run / layout.RUN_FILE, msgspec.to_builtins(done))


def shared_run(base: Path, rank: int, world_size: int, job: str) -> Path:
    """The run folder of all ranks of a job, agreed through files: rank 0 makes it and answers.

    A rank asks with a word that nobody has used before, so an answer can't be of an older job.
    """
    if world_size == 1:
        return make_run(base, 1)
    meeting = base / f".meeting-{hashlib.sha256(job.encode()).hexdigest()[:12]}"
    try:
        meeting.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TensortapError(f"cannot make a run in {base}: {error.strerror}") from None
    if rank == 0:
        run = make_run(base, world_size)
        answering = threading.Thread(
            target=_answer, args=(meeting, run.name, world_size), daemon=True,
            name="tensortap-meeting",
        )  # fmt: skip
        answering.start()
        return run
    return _ask(base, meeting, rank, world_size)


def _ask(base: Path, meeting: Path, rank: int, world_size: int) -> Path:
    word = secrets.token_hex(8)
    question = meeting / f"{rank}-{word}.ask"
    answer = meeting / f"{rank}-{word}.run"
    question.touch()
    end = time.monotonic() + _ASK
    try:
        while time.monotonic() < end:
            with contextlib.suppress(FileNotFoundError):
                # listed first: network file systems remember that a file was not there
                os.listdir(meeting)
                return base / answer.read_text()
            time.sleep(0.02)
    finally:
        for path in (question, answer):
            path.unlink(missing_ok=True)
    log.warning(
        "tensortap: rank 0 did not say where the run is within %.0f s (is %s shared between the "
        "machines?); rank %d keeps a run of its own",
        _ASK, base, rank,
    )  # fmt: skip
    return make_run(base, world_size)


def _answer(meeting: Path, name: str, world_size: int) -> None:
    end = time.monotonic() + _ANSWER
    told: set[str] = set()
    while len(told) < world_size - 1 and time.monotonic() < end:
        with contextlib.suppress(OSError):
            for question in meeting.glob("*.ask"):
                rank = question.name.partition("-")[0]
                draft = question.with_suffix(".draft")
                draft.write_text(name)
                draft.replace(question.with_suffix(".run"))
                question.unlink(missing_ok=True)
                told.add(rank)
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        # the last of the others may still be reading: then the folder stays for the next job
        for _ in range(100):
            if not os.listdir(meeting):
                break
            time.sleep(0.05)
        meeting.rmdir()


def job_name() -> str:
    """What all ranks of a job have in common and other jobs have not."""
    names = (
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
        "SLURM_JOB_ID", "SLURM_STEP_ID", "JAX_COORDINATOR_ADDRESS", "WORLD_SIZE",
    )  # fmt: skip
    return "\n".join(f"{name}={os.environ.get(name, '')}" for name in names)
