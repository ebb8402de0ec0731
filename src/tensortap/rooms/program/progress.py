"""A line of progress in the last row of the terminal, which nothing that a program prints meets."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING, Any

from tensortap.cli.terminal import message
from tensortap.rooms.track.budget import parse_budget

if TYPE_CHECKING:
    from tensortap.rooms.program.torch.finding import TrainedModel
    from tensortap.rooms.track.options import TrackOptions

_SECONDS = 0.5  # between two updates
_SAVE, _RESTORE = "\x1b7", "\x1b8"  # the cursor with its colors
_MAKE_ROOM = "\x1bD\x1bM"  # a row down, which scrolls if it is the last, and a row up
_WHOLE_SCREEN = "\x1b[r"
# In a session of its own and no child of the program, it reads which row is taken, and gives the
# last one back when the program is gone. 0: the program has done so.
_GUARD = r"""exec 3<&0; { while read -r row; do last=$row; done; [ "$last" = 0 ] ||
printf '\0337\033[r\033[%s;1H\033[m\033[K\0338' "$last" >&2; } <&3 &"""


class Progress:
    """Says which model is tracked, and shows step, loss, speed and alerts while it trains.

    The last row of the terminal is taken out of the region that scrolls, so whatever the program
    and the processes that it starts print stays above it. Each update is one `write` that leaves
    the cursor where it was, and begins anew: the program may have cleared or reset the screen, and
    the user may have resized it.
    """

    def __init__(self, line: bool = True) -> None:
        self._line = line
        self._said = False
        self._row = 0  # of the line, once it is there
        self._last = 0.0, 0  # the time and the step of the last update
        self._guard: Any = None  # the socket to what gives the row back if the program is killed
        self._inode = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_guard": None}  # a process that is started has its own

    def __call__(self, model: TrainedModel) -> None:
        tracker = model.tracker
        if tracker is None:
            return
        now = time.monotonic()
        if not self._said:
            self._said = True
            place = "" if tracker.path is None else f" into {tracker.path}"
            rules = len(tracker._observer.rules)
            if (size := _size()) is not None:
                _write(" " * size[0] + "\r")  # to a new row, unless the cursor begins one
            how = _described(tracker._observer.options)
            message(f"tracks {model.titles} {how} with {rules} rules{place}")
            self._last = now, model.steps
        elif self._line and now >= self._last[0] + _SECONDS:
            speed = abs(model.steps - self._last[1]) / (now - self._last[0])
            self._last = now, model.steps
            count = len(tracker.alerts)
            alerts = f"{count} alert{'s' * (count != 1)}" if count else "no alerts"
            loss = f"loss {model.loss:.4g}" if model.losses else "no loss seen"
            self._draw(f"step {model.steps:,}, {loss}, {speed:.3g} steps/s, {alerts}")

    def _draw(self, text: str) -> None:
        if (size := _size()) is not None:
            columns, row = size
            if row != self._row:
                self._row = row
                self._tell_guard(row)
            region, line = f"\x1b[1;{self._row - 1}r", f"\x1b[{self._row};1H\x1b[m\x1b[K"
            text = f"tensortap: {text}"[: columns - 1]
            _write(f"{_MAKE_ROOM}{_SAVE}{region}{line}{text}{_RESTORE}")

    def end(self) -> None:
        """Give the last row back."""
        if self._row:
            _write(f"{_SAVE}{_WHOLE_SCREEN}\x1b[{self._row};1H\x1b[m\x1b[K{_RESTORE}")
            self._row = 0
            self._tell_guard(0)
            self._forget_guard()

    def _tell_guard(self, row: int) -> None:
        """Have a row given back if the program is killed; 0 ends this."""
        try:
            if self._guard is None and row:
                self._guard, theirs = socket.socketpair()
                self._inode = os.fstat(self._guard.fileno()).st_ino
                os.register_at_fork(after_in_child=self._forget_guard)
                with theirs:
                    subprocess.run(
                        ["/bin/sh", "-c", _GUARD], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                        check=False, start_new_session=True,
                    )  # fmt: skip
            if self._is_ours():
                self._guard.send(b"%d\n" % row, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return  # there is none: a line of progress is not worth more

    def _forget_guard(self) -> None:
        guard, self._guard = self._guard if self._is_ours() else None, None
        if guard is not None:
            guard.close()

    def _is_ours(self) -> bool:
        """Return whether the program has left the socket open: its number may be another file's."""
        try:
            return os.fstat(self._guard.fileno()).st_ino == self._inode
        except (AttributeError, OSError):
            return False


def _described(options: TrackOptions) -> str:
    every = options.every
    if options.budget:
        share = f"{parse_budget(options.budget) or 0:.3%}".rstrip("%0").rstrip(".")
        return f"within a budget of {share}%"
    if not every:
        return "when tensortap probe says so"
    return "in every step" if every == 1 else f"in one of {every} steps"


def _size() -> tuple[int, int] | None:
    """Return columns and rows of the terminal, if stderr is one on which a line can stand now."""
    if os.environ.get("TERM", "dumb") == "dumb" or "curses" in sys.modules:
        return None
    try:
        if os.tcgetpgrp(2) != os.getpgrp():  # the program is in the background
            return None
        if not termios.tcgetattr(2)[3] & termios.ICANON:  # an editor, a pager or a prompt has it
            return None
        if not select.select([], [2], [], 0)[1]:  # stopped by Ctrl-S, which must not stop training
            return None
        columns, rows = os.get_terminal_size(2)
    except (OSError, ValueError, termios.error):
        return None
    return (columns, rows) if min(columns, rows) > 5 else None


def _write(sequence: str) -> None:
    try:
        os.write(2, sequence.encode())  # the program may have replaced `sys.stderr`
    except OSError:
        return  # there is no terminal any more
