"""Run commands on hostile runs in this process, one forked child per run, and report each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

SECONDS = 5
MEMORY = 500 << 20
_ADDRESSES = 12 << 30  # of one child, so that a bomb does not take the machine with it


def commands(run: Path, good: Path, out: Path) -> dict[str, list[str]]:
    """Return the commands by what they do; they write into `out`."""
    here = str(run)
    return {
        "ls": ["ls", str(run.parent)],
        "ls --json": ["ls", str(run.parent), "--json"],
        "show": ["show", here],
        "show a tensor": ["show", here, "w", "--values"],
        "show a dict": ["show", here, "d", "--values"],
        "show a file": ["show", here, "f", "--values"],
        "align": ["align", here, here],
        "compare": ["compare", here, str(good)],
        "compare --json": ["compare", str(good), here, "--json"],
        "report": ["report", here, str(out / "a.html")],
        "film": ["film", here, "w", str(out / "a.gif"), "--size", "160x120"],
        "check": ["check", here],
        "check --json": ["check", here, "--json"],
        "ranks": ["ranks", here],
        "ranks --json": ["ranks", here, "--json"],
        "why": ["why", here],
        "why --json": ["why", here, "--json"],
        "reproduce": ["reproduce", here, "--out", str(out / "again")],
        "compact": ["compact", here],
    }


def run_all(runs: dict[str, Path], good: Path, share: int) -> list[list[Any]]:
    """Return run, command and complaint for each command that did not end as it must.

    Each run gets one in `share` of the commands, another selection than its neighbors.
    """
    __import__("torch")
    with tempfile.TemporaryDirectory() as out:
        # in this process, so that no child has to import anything
        checked = commands(good, good, Path(out)).items()
        found = [
            ["the good run", name, said] for name, args in checked if (said := _complaint(args))
        ]
    for number, (name, path) in enumerate(runs.items()):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            try:
                _child(path, good, writing, slice(number % share, None, share))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as lines:
            reports = [json.loads(line) for line in lines]
        _, status = os.waitpid(child, 0)
        found += [[name, *report] for report in reports if report[1]]
        if status or not reports or reports[-1][0] != "end":
            last = reports[-1][0] if reports else "start"
            found.append([name, f"after {last}", f"died with status {status}"])
    return found


def _child(run: Path, good: Path, writing: int, selection: slice) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    out = Path(tempfile.mkdtemp())
    for name, arguments in list(commands(run, good, out).items())[selection]:
        complaint = _complaint(arguments)
        os.write(writing, (json.dumps([name, complaint]) + "\n").encode())
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    complaint = f"took {used >> 20} MiB" if used > MEMORY else ""
    os.write(writing, (json.dumps(["end", complaint]) + "\n").encode())
    shutil.rmtree(out, ignore_errors=True)


def _complaint(arguments: list[str]) -> str:
    """Return what is wrong with how a command ended; empty if nothing is."""
    from tensortap.cli.main import main

    sys.argv = ["tensortap", *arguments]
    out, errors, code = io.StringIO(), io.StringIO(), 0
    signal.setitimer(signal.ITIMER_PROF, 4 * SECONDS)  # a command that never ends is killed
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            return traceback.format_exc()[-600:]
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - start
    if seconds > SECONDS:
        return f"took {seconds:.1f} s"
    said = errors.getvalue()
    if code not in (0, 1, 2):
        return f"exited with {code}"
    if code == 2 and (said.count("\n") != 1 or not said.startswith("tensortap: ")):
        return f"is not one sentence: {said[:300]!r}"
    if "Traceback" in said:
        return said[-600:]
    wild = {c for c in out.getvalue() + said if not (c.isprintable() or c == "\n")}
    return f"printed {sorted(wild)}" if wild else ""


if __name__ == "__main__":
    for line in sys.stdin:
        order = json.loads(line)
        paths = {name: Path(path) for name, path in order["runs"].items()}
        print(json.dumps(run_all(paths, Path(order["good"]), order["share"])), flush=True)
