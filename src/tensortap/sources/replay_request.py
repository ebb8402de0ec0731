"""A request to replay a step, which `tensortap replay` hands to the program that it starts."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import NamedTuple

VARIABLE = "TENSORTAP_REPLAY"
REQUEST, ANSWER = "request.json", "answer.json"


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


def write_request(request: ReplayRequest) -> None:
    """Write a request, for a program that is started with its folder in the environment."""
    content = {
        "out": str(request.out), "run": str(request.run), "step": request.step,
        "paths": request.paths,
    }  # fmt: skip
    (request.folder / REQUEST).write_text(json.dumps(content), "utf-8")
