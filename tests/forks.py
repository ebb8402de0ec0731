"""Programs without the time that a fresh Python takes to import torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Forks:
    """A process that has imported what programs import, which takes longer than all they do.

    It forks a program, or each of its ranks, and says how they have ended: `0` for each that did
    well. What rank 1 has printed is in `program.py.o1`, and its errors are in `program.py.e1`.
    """

    CODE = """
    import json, os, runpy, sys
    import torch, tensortap, {imports}

    def run(task, rank):
        os.environ.clear()
        os.environ.update(task["env"])
        if task["world"] is not None:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task["world"]))
        os.chdir(os.path.dirname(task["program"]))
        sys.argv = [task["program"], *task["arguments"]]
        outputs = [f"{{task['program']}}.{{kind}}{{rank}}" for kind in "oe"]
        for fd, name in enumerate(["/dev/null", *outputs]):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), fd)
        runpy.run_path(task["program"], run_name="__main__")
        sys.exit()

    for line in sys.stdin:
        task, ranks = json.loads(line), []
        for rank in range(task["world"] or 1):
            ranks.append(os.fork())
            if not ranks[-1]:
                run(task, rank)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(json.dumps(codes), flush=True)
    """

    def __init__(self, imports="torch.distributed"):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(self.CODE).format(imports=imports)], text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def __call__(self, program, env, *arguments, world=None):
        """Run a file in its folder; `world` ranks of it, where it is to have ranks."""
        task = {"program": str(program), "env": env, "arguments": arguments, "world": world}
        print(json.dumps(task), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its ranks too
        self.process.communicate()
