"""The line of progress of `tensortap run`, in a terminal: it stays below what programs print."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import termios
import textwrap

import pyte
import pytest

from tests.fixtures import starter  # noqa: F401
from tests.processes import wait_for

pytestmark = pytest.mark.slow

COLUMNS = 200
BEGIN = """
    import fcntl, os, runpy, signal, sys, termios, time
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal of this session
    if program := os.fork():  # the session outlives the program, as a shell does
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        while os.path.exists("alive"):
            time.sleep(0.02)
        os._exit(code)
    import tensortap.rooms.program.progress as progress
    progress._SECONDS = 0.02  # many updates
    sys.argv = {words}
    if sys.argv[0] == "tensortap":
        from tensortap.cli.main import main
        main()
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
"""
PROGRAM = """
    import os, subprocess, sys, time, torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        (model(torch.randn(3, 4)) - torch.randn(3, 2)).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
    step()
    print("the program begins")
"""
PROGRAMS = {
    "lines": """
        for i in range(60):
            step()
            print("wide " * 50 if i % 20 == 7 else f"line {i}")
    """,
    "bars": """
        from tqdm import tqdm
        for epoch in range(2):
            for i in tqdm(range(40), f"epoch {epoch}", ascii=True, mininterval=0):
                step()
                if i % 8 == 0:
                    tqdm.write(f"written {i}")
    """,
    "dots": """
        for i in range(150):  # all in one row
            step()
            print(".", end="", flush=True)
        print()
    """,
    "processes": """
        loop = "for i in $(seq 30); do echo child $i >&2; sleep 0.01; done"
        child = subprocess.Popen(["sh", "-c", loop])
        for i in range(30):
            step()
            subprocess.run(["echo", f"run {i}"])
        child.wait()
    """,
    "redraws": """
        for i in range(60):
            print(f"first {i}\\nsecond {i}\\nthird {i}")
            step()
            print("\\x1b[3A" if i % 6 else "\\x1b[31m", end="")
        print("\\x1b[3B\\x1b[m", end="")
    """,
    "clears": """
        for i in range(60):
            step()
            if i % 20 == 0:
                print(("\\x1bc", "\\x1b[H\\x1b[2J", "\\x1bc")[i // 20], end="", flush=True)
            print(f"line {i}")
    """,
    "is left by its processes": """
        open("alive", "w").close()
        loop = f"while kill -0 {os.getpid()} 2>&-; do sleep 0.1; done"
        child = subprocess.Popen(["sh", "-c", f"echo begins; {loop}; echo ends; rm alive"])
        for i in range(20):
            step()
        raise SystemExit("enough")
    """,
}


@pytest.fixture
def terminal(starter, tmp_path):  # noqa: F811
    """Return a function that runs words in a terminal and returns what it shows in the end."""

    def run(*words, rows=12, on_line=None, then=None, term="xterm-256color", streams=()):
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", rows, COLUMNS, 0, 0))
        screen = pyte.HistoryScreen(COLUMNS, rows, history=10_000, ratio=1)
        stream = pyte.ByteStream(screen)
        ends = [theirs, *(streams.get(n) or os.dup(theirs) for n in (1, 2))] if streams else None
        ends = ends or [theirs, os.dup(theirs), os.dup(theirs)]
        code = textwrap.dedent(BEGIN).format(words=[*map(str, words)])
        started = starter.start(code, {**os.environ, "TERM": term}, tmp_path, ends, quick=True)
        screen.lines_of_progress, screen.bytes = set(), b""
        while True:
            ready = select.select([ours], [], [], 0.2)[0]
            try:
                text = os.read(ours, 4096) if ready else b""
            except OSError:  # all processes have closed it
                break
            screen.bytes += text
            stream.feed(text)
            if "steps/s" in screen.display[-1]:
                screen.lines_of_progress.add(screen.display[-1].rstrip())
                if on_line is not None:
                    on_line(ours)
                    on_line = None
            if then is not None and on_line is None and screen.margins is None:
                then()
                then = None
        os.close(ours)
        screen.code = started.wait(60)
        gone = ("".join(line[x].data for x in range(60)) for line in screen.history.top)
        screen.text = "\n".join(line.rstrip() for line in (*gone, *screen.display)).rstrip()
        return screen

    return run


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def without_ours(text):
    """Return what a program has printed: neither the first message nor the verdict."""
    text = re.sub(r"tensortap: tracks .*\n", "", text)
    return re.sub(r"\d+:\d+.*", "", text.split("tensortap: ")[0]).rstrip()  # times of bars


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_line_disturbs_no_program(terminal, program, name):
    with program.open("a") as file:
        file.write(textwrap.dedent(PROGRAMS[name]))
    shown, alone = terminal("tensortap", "run", program), terminal(program)
    line = r"tensortap: step \d+, loss \S+, \S+ steps/s, no alerts"
    assert len(shown.lines_of_progress) > 3
    assert all(re.fullmatch(line, each) for each in shown.lines_of_progress)
    assert "steps/s" not in shown.text
    assert (shown.margins, shown.code) == (None, alone.code)
    own, plain = without_ours(shown.text), without_ours(alone.text)
    if name == "clears":  # what was on the screen before is gone, more or less of it
        own, plain = ("line 40" + each.split("line 40")[-1] for each in (own, plain))
    if name == "processes":  # they print at the same time
        own, plain = (sorted(each.splitlines()) for each in (own, plain))
    if name.startswith("is left"):
        assert shown.text.rstrip().endswith("ends")
    else:
        assert own == plain


def test_ctrl_c_gives_the_row_back(terminal, program):
    with program.open("a") as file:
        file.write("while True:\n    step()\n    print('one more')\n")
    shown = terminal("tensortap", "run", program, on_line=lambda keys: os.write(keys, b"\x03"))
    assert (shown.margins, shown.code) == (None, 130)
    assert "KeyboardInterrupt" in shown.text
    assert "tensortap view" in shown.text
    assert not re.search(r"\d steps/s", shown.text)  # a traceback may show the line that prints it
    assert "runpy" not in shown.text


def test_a_program_that_is_killed_gives_the_row_back(terminal, program, tmp_path):
    """Also while a process that it has forked lives on."""
    alive = tmp_path / "alive"
    with program.open("a") as file:
        file.write(
            textwrap.dedent("""
            forked = False
            open("alive", "w").write(str(os.getpid()))
            while True:
                step()
                if not forked and os.path.exists("fork"):
                    forked = True
                    if os.fork() == 0:
                        while os.path.exists("alive"):
                            time.sleep(0.02)
                        os._exit(0)
                    os.rename("fork", "forked")
        """)
        )

    def kill(_):
        (tmp_path / "fork").touch()
        wait_for((tmp_path / "forked").exists)
        os.kill(int(alive.read_text()), signal.SIGKILL)

    shown = terminal("tensortap", "run", program, on_line=kill, then=alive.unlink)
    assert (shown.margins, shown.code) == (None, 256 - signal.SIGKILL)
    assert shown.lines_of_progress
    assert "steps/s" not in shown.text


def test_the_terminal_is_resized(terminal, program):
    with program.open("a") as file:
        file.write("for i in range(100):\n    step()\n    print('line', i)\n")

    def shrink(keys):
        fcntl.ioctl(keys, termios.TIOCSWINSZ, struct.pack("4H", 8, COLUMNS, 0, 0))

    shown = terminal("tensortap", "run", program, on_line=shrink)
    assert shown.code == 0
    assert b"\x1b[1;11r" in shown.bytes
    assert b"\x1b[1;7r" in shown.bytes
    assert shown.bytes.rindex(b"\x1b[r") > shown.bytes.rindex(b"\x1b[1;7r")


@pytest.mark.parametrize("why", ["dumb", "low", "asked", "stderr", "raw", "curses"])
def test_no_line(terminal, program, tmp_path, why):
    """There is none where it could disturb; the rest is printed."""
    first = {
        "raw": "import tty; tty.setcbreak(0)",  # as an editor or a prompt sets the terminal
        "curses": "import curses",
    }.get(why, "")
    steps = "for i in range(10):\n    step()\n    time.sleep(0.02)\n"
    program.write_text(f"{first}\n{program.read_text()}{steps}")
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_RDWR)
    shown = terminal(
        "tensortap", "run", *(["--no-progress"] if why == "asked" else []), program,
        rows=4 if why == "low" else 12, term="dumb" if why == "dumb" else "xterm",
        streams={2: log} if why == "stderr" else (),
    )  # fmt: skip
    assert b"the program begins" in shown.bytes
    assert b"steps/s" not in shown.bytes
    assert b"\x1b[1;" not in shown.bytes
    assert ("tensortap view" in shown.text) == (why != "stderr")
    if why == "stderr":
        assert "steps/s" not in (tmp_path / "log").read_text()


def test_nothing_of_the_line_is_on_stdout(terminal, program, tmp_path):
    with program.open("a") as file:
        file.write("for i in range(10):\n    step()\n    print('line', i)\n")
    out = os.open(tmp_path / "out", os.O_CREAT | os.O_RDWR)
    shown = terminal("tensortap", "run", program, streams={1: out})
    assert shown.lines_of_progress
    expected = ["the program begins", *(f"line {i}" for i in range(10))]
    assert (tmp_path / "out").read_text().splitlines() == expected
