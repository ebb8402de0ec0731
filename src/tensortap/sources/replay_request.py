"""A request to replay a step, which `tensortap replay` hands to the program that it starts."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "TENSORTAP_REPLAY"
REQUEST = "request.json"


class ReplayRequest(NamedTuple):
    """Step, run and probes of a replay.

    The values go into a run below `out`, and the rest of the answer into `folder`.
    """

    folder: Path
    out: Path
    run: Path
    step: int
    paths: tuple[str, ...]


@functools.cache
def requested() -> ReplayRequest | None:
    """Return what this process was started to replay; None in any other program."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    content = json.loads((Path(folder) / REQUEST).read_text("utf-8"))
    out, run = Path(content["out"]), Path(content["run"])
    return ReplayRequest(Path(folder), out, run, int(content["step"]), tuple(content["paths"]))


def answer_file(folder: Path, rank: int) -> Path:
    """Return the file with the answer of a rank."""
    return folder / f"answer.{rank}.json"


def answers(folder: Path) -> list[dict[str, Any]]:
    """Return the answers of all ranks, in the order in which they were written."""
    files = sorted(folder.glob("answer.*.json"), key=lambda file: file.stat().st_mtime_ns)
    return [json.loads(file.read_text("utf-8")) for file in files]


def write_request(request: ReplayRequest) -> None:
    """Write a request, for a program that is started with its folder in the environment."""
    content = {
        "out": str(request.out), "run": str(request.run), "step": request.step,
        "paths": request.paths,
    }  # fmt: skip
    (request.folder / REQUEST).write_text(json.dumps(content), "utf-8")
