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


class Starter:
    """A process that has imported what programs import, which takes longer than all they do."""

    CODE = """
    import atexit, gc, json, os, select, socket, sys, threading, types
    {imports}

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
        code = compile(task["code"], "<string>", "exec")
        if not task["quick"]:
            exec(code, main.__dict__)
            sys.exit()
        status = 0
        try:
            exec(code, main.__dict__)
        except SystemExit as ended:
            status = ended.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

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

    def start(self, code, env, folder=None, ends=None, quick=False):
        """Run code as `python -c` does, with pipes or with `ends` as its standard streams.

        A quick program ends with its threads and exit functions, but without the teardown of all
        its modules, which takes longer than most programs.
        """
        folder = str(folder or os.getcwd())
        task = {"code": code, "env": env, "folder": folder, "quick": quick}
        return ForkedProcess(self.orders, json.dumps(task).encode(), ends)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.orders.close()


class ForkedProcess:
    """As much of `subprocess.Popen` as tests use, for a program that another process has forked."""

    def __init__(self, orders, task, ends=None):
        report, theirs = os.pipe()
        if ends is None:
            inward, outward, errors = (os.pipe() for _ in range(3))
            ends = [inward[0], outward[1], errors[1]]
            self.stdin = os.fdopen(inward[1], "w")
            self.stdout, self.stderr = (os.fdopen(pipe[0]) for pipe in (outward, errors))
        socket.send_fds(orders, [task], [*ends, theirs])
        for end in (*ends, theirs):
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


class Forks:
    """Runs files in forks of a `Starter`, one or several ranks of each.

    What rank 1 has printed is in `program.py.o1`, and its errors are in `program.py.e1`.
    """

    CODE = """
    import runpy, sys
    sys.argv = {arguments}
    # kept: torch may hang if it destroys a process group whose thread needs the interpreter
    kept = runpy.run_path(sys.argv[0], run_name="__main__")
    """

    def __init__(self, starter):
        self.starter = starter

    def __call__(self, program, env, *arguments, world=None):
        """Run a file in its folder; return how its ranks have ended: 0 for each that did well."""
        code = textwrap.dedent(self.CODE).format(arguments=[str(program), *arguments])
        ranks = []
        for rank in range(world or 1):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world} if world else {}
            env = env | {name: str(number) for name, number in own.items()}
            names = ["/dev/null", *(f"{program}.{kind}{rank}" for kind in "oe")]
            ends = [os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666) for name in names]
            folder = Path(program).parent
            ranks.append(self.starter.start(code, env, folder, ends, quick=True))
        try:
            return [rank.wait() for rank in ranks]
        except BaseException:  # a timeout
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
            raise
