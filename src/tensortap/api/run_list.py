"""The runs of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensortap.errors import NotFound, TensortapError
from tensortap.readers.run import RunReader
from tensortap.runs import layout


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """What is known of each run below a folder, oldest first."""
    if not folder.is_dir():
        raise NotFound(f"no folder {folder}")
    found = []
    for path in sorted(folder.iterdir()):
        if not (path / layout.RUN_FILE).is_file():
            continue
        try:
            reader = RunReader(path)
        except TensortapError as error:
            found.append(_row(path, "", f"unreadable: {error}", 0, 0, 0))
            continue
        counts = reader.counts()
        state = "ended" if reader.info.ended else "open"
        if reader.truncated:
            state = "cut off"
        started = reader.info.started
        row = _row(path, started, state, sum(counts.values()), len(counts), len(reader.ranks))
        found.append(row)
    return found


def _row(path: Path, started: str, state: str, records: int, names: int, ranks: int) -> Any:
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return {
        "run": path.name, "started": started, "state": state, "records": records,
        "names": names, "ranks": ranks, "nbytes": nbytes,
    }  # fmt: skip
