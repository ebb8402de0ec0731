"""The tabs of words: alerts, provenance, the receipt."""

from __future__ import annotations

import collections
import dataclasses
import os
import shlex
import time
from pathlib import Path
from typing import Any

import msgspec

from tensortap.pipeline.pipeline import pipeline
from tensortap.pipeline.receipt import Receipt
from tensortap.readers.live import LiveReader
from tensortap.readers.run import RunReader
from tensortap.runs import layout
from tensortap.server import answers
from tensortap.web.catalog import inside
from tensortap.web.entries import Shown, ShownHere
from tensortap.web.responses import Asked

_ALERTS = 2000
_PATCH = 400_000  # characters of a patch that are shown


def alerts(asked: Asked) -> dict[str, Any]:
    """The alerts, in the order in which they came; of very many the first and the last."""
    found = asked.shown.table().alerts()
    shown = found if len(found) <= _ALERTS else [*found[: _ALERTS // 2], *found[-_ALERTS // 2 :]]
    return {
        "total": len(found),
        "alerts": [
            {
                "rule": each.rule, "name": each.name, "kind": each.kind.value, "step": each.step,
                "rank": each.rank, "module": each.module, "message": each.message,
                "origin": each.origin, "again": each.again,
            }
            for each in shown
        ],
    }  # fmt: skip


# -- provenance ----------------------------------------------------------------------------


def provenance(asked: Asked) -> dict[str, Any]:
    """What ran, what was changed, and how to run it again."""
    shown = asked.shown
    reader: Any = shown.reader()
    if not isinstance(reader, RunReader):
        return {"live": True, "programs": _programs(shown)}
    folder = reader.path
    runtime = _part(folder, "runtime_info.json")
    packages = _part(folder, "packages.json")
    git = _part(folder, "git_info.json")
    return {
        "live": False,
        "run": msgspec.to_builtins(reader.info),
        "folder": str(folder),
        "command": runtime.get("command") or {},
        "working_directory": runtime.get("working_directory"),
        "host": runtime.get("host"),
        "python": runtime.get("python") or packages.get("python_version"),
        "platform": packages.get("platform"),
        "devices": runtime.get("device_names") or [],
        "seeds": runtime.get("seeds") or {},
        "environment": runtime.get("environment_variables") or {},
        "packages": packages.get("all_packages") or {},
        "git": git.get("project_git_info") or {},
        "packages_git": git.get("packages_git_info") or {},
        "modifications": git.get("runtime_modifications") or {},
        "patches": _patches(folder),
        "changed_on_the_way": sorted(p.name for p in folder.glob("*.[0-9].json")),
        "reproduce": f"tensortap reproduce {shlex.quote(str(folder))}",
    }


def _part(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    found = layout.read_json(inside(path, folder)) if path.exists() else None
    return found if isinstance(found, dict) else {}


def _patches(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("*.patch"))[:20]:
        text = inside(path, folder).read_text(encoding="utf-8", errors="replace")
        found.append({"name": path.name, "size": len(text), "text": text[:_PATCH]})
    return found


# -- the receipt ---------------------------------------------------------------------------


def receipt(asked: Asked) -> dict[str, Any]:
    """What it cost, what was dropped, and how fast records came."""
    shown = asked.shown
    reader: Any = shown.reader()
    if isinstance(reader, RunReader):
        return _receipt_of_run(reader)
    view = _overview(shown)
    return {
        "live": True,
        "records": view.written,
        "nbytes": view.written_nbytes,
        "held_nbytes": view.nbytes,
        "bound": view.bound,
        "evicted": view.evicted,
        "refused": view.rejected,
        "seconds": max(0.0, time.time() - view.started),
        "programs": _programs(shown),
        "bill": _bill() if isinstance(shown, ShownHere) else None,
    }


def _receipt_of_run(reader: RunReader) -> dict[str, Any]:
    import pyarrow.compute as pc

    table = reader.table(["time_ns", "step", "missing"])
    times, steps = (pc.min_max(table.column(name)).as_py() for name in ("time_ns", "step"))
    seconds = (times["max"] - times["min"]) / 1e9 if table.num_rows else 0.0
    dropped = reader.missing() if pc.any(table.column("missing")).as_py() else []
    lost = collections.Counter(name for name, _, _ in dropped)
    open_run = _open_here(reader.path)
    return {
        "live": False,
        "records": table.num_rows - sum(lost.values()),
        "names": len(reader.counts()),
        "ranks": len(reader.ranks),
        "world_size": reader.info.world_size,
        "nbytes": {part: _size(reader.path / part) for part in ("records", "tensors", ".")},
        "seconds": seconds,
        "steps": steps["max"] - steps["min"] + 1 if table.num_rows else 0,
        "dropped": sum(lost.values()),
        "dropped_names": lost.most_common(50),
        "cut": sum(reader.truncated.values()),
        "bill": _bill() if open_run else _largest(reader.receipts()),
    }


def _open_here(path: Path) -> bool:
    """Whether this process writes that run."""
    from tensortap.sources.init import opened

    run = opened()
    return run is not None and run.path.resolve() == path.resolve()


def _bill() -> dict[str, Any]:
    return dataclasses.asdict(pipeline.receipt())


def _largest(receipts: dict[int, Receipt]) -> dict[str, Any] | None:
    """The bill of the rank that has paid most."""
    if not receipts:
        return None
    rank = max(receipts, key=lambda each: receipts[each].seconds)
    return {**dataclasses.asdict(receipts[rank]), "rank": rank if len(receipts) > 1 else None}


def _size(folder: Path) -> int:
    """Bytes of the files right in a folder, or of all below it where it is not the run itself."""
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue  # sealed, and so renamed, in this moment
        if folder.name == "" or (folder / layout.RUN_FILE).exists():
            break
    return total


def _overview(shown: Shown) -> Any:
    if isinstance(shown, ShownHere):
        return answers.overview(shown.server)
    reader: Any = shown.reader()
    return reader.overview() if isinstance(reader, LiveReader) else None


def _programs(shown: Shown) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(client) for client in _overview(shown).clients]
