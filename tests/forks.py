"""Programs without the time that a fresh Python takes to import torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Forks:
    """A process that has imported what programs import, which takes longer than all they do.

    It forks a program, or each of its ranks, and says how they have ended: `0` for each that did
    well. What rank 1 has printed is in `program.py.o1`, and its errors are in `program.py.e1`.
    A program ends with its threads and exit functions, without the teardown of all its modules,
    which takes longer than most programs; programs of tests/live end with it.
    """

    CODE = """
    import atexit, gc, json, os, runpy, sys, threading
    # an optimizer and DDP import the last of torch
    import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, torch.nn.parallel
    import h5py, pandas, plotly.graph_objects, pyarrow.parquet
    import tensortap, tensortap.rooms.compare.report, tensortap.values.numpy.adapter
    import tensortap.values.torch.adapter, tensortap.rooms.track.torch.track
    import tensortap.rooms.trace.hdf5.callback, tensortap.rooms.provenance.packages
    import tensortap.runs.run_reader
    import tensortap.live.sink, tensortap.runs.sink, tensortap.runs.init
    import tensortap.rooms.track.track, tensortap.stats.summarize

    tensortap.rooms.provenance.packages.packages_info()  # the next call knows most of it
    gc.freeze()

    def run(task, rank):
        os.environ.clear()
        os.environ.update(task["env"])
        if task["world"] is not None:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task["world"]))
        os.chdir(os.path.dirname(task["program"]))
        sys.argv = [task["program"], *task["arguments"]]
        outputs = [f"{task['program']}.{kind}{rank}" for kind in "oe"]
        for fd, name in enumerate(["/dev/null", *outputs]):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), fd)
        code = 0
        try:
            runpy.run_path(task["program"], run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    for line in sys.stdin:
        task, ranks = json.loads(line), []
        for rank in range(task["world"] or 1):
            ranks.append(os.fork())
            if not ranks[-1]:
                run(task, rank)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(json.dumps(codes), flush=True)
    """

    def __init__(self):
        self._start()

    def _start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(self.CODE)], text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def __call__(self, program, env, *arguments, world=None):
        """Run a file in its folder; `world` ranks of it, where it is to have ranks."""
        task = {"program": str(program), "env": env, "arguments": arguments, "world": world}
        print(json.dumps(task), file=self.process.stdin, flush=True)
        try:
            return json.loads(self.process.stdout.readline())
        except BaseException:  # a timeout: the next test must not read the answer to this one
            self.close()
            self._start()
            raise

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its ranks too
        self.process.communicate()


class Starter:
    """A process like that of `Forks` for programs that tests talk to while they run."""

    CODE = """
    import gc, json, os, select, socket, sys, types
    import {imports}

    def run(task, ends, report):
        os.setsid()
        for number, end in enumerate(ends):
            os.dup2(end, number)
        orders.close()
        for others in ([*ends, report], running, [end for _, end in running.values()]):
            for end in others:
                os.close(end)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
        os.chdir(task["folder"])
        sys.argv = ["-c"]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(task["code"], "<string>", "exec"), main.__dict__)
        sys.exit()

    orders, running = socket.socket(fileno=int(sys.argv[1])), {{}}
    gc.freeze()
    while True:
        ready = select.select([orders, *running], [], [])[0]
        for ended in running.keys() & set(ready):
            pid, report = running.pop(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(report, f"{{code}}\\n".encode())
            os.close(report)
            os.close(ended)
        if orders in ready:
            message, (*ends, report), *_ = socket.recv_fds(orders, 1 << 20, 4)
            task = json.loads(message)
            os.environ.clear()
            os.environ.update(task["env"])
            pid = os.fork()
            if not pid:
                run(task, ends, report)
            running[os.pidfd_open(pid)] = pid, report
            os.write(report, f"{{pid}}\\n".encode())
            for end in ends:
                os.close(end)
    """

    def __init__(self, imports):
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = textwrap.dedent(self.CODE).format(imports=imports)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()

    def start(self, code, env, folder=None, terminal=None):
        """Run code as `python -c` does, with pipes or in a terminal."""
        task = {"code": code, "env": env, "folder": str(folder or os.getcwd())}
        return ForkedProcess(self.orders, json.dumps(task).encode(), terminal)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.orders.close()


class ForkedProcess:
    """As much of `subprocess.Popen` as tests use, for a program that another process has forked."""

    def __init__(self, orders, task, terminal=None):
        report, theirs = os.pipe()
        if terminal is None:
            inward, outward, errors = (os.pipe() for _ in range(3))
            ends = [inward[0], outward[1], errors[1], theirs]
            self.stdin = os.fdopen(inward[1], "w")
            self.stdout, self.stderr = (os.fdopen(pipe[0]) for pipe in (outward, errors))
        else:
            ends = [terminal, os.dup(terminal), os.dup(terminal), theirs]
        socket.send_fds(orders, [task], ends)
        for end in ends:
            os.close(end)
        self._report = os.fdopen(report)
        self.pid = int(self._report.readline())
        self.returncode = None

    def poll(self):
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def wait(self, timeout=None):
        """Wait for its end; return the exit code."""
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = int(self._report.readline())
            self._report.close()
        return self.returncode

    def communicate(self, timeout=None):
        """Wait for its end; return the rest of what it printed."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        texts = ["", ""]

        def read(number, stream):
            texts[number] = "" if stream.closed else stream.read()

        streams = enumerate((self.stdout, self.stderr))
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self.stdout.close()
        self.stderr.close()
        self.wait(timeout)
        return tuple(texts)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)
