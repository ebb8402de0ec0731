"""Messages, a progress bar and waiting for Ctrl-C, shared by the commands."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import typer

from tensortap.core.errors import TensortapError


def message(text: str) -> None:
    """Print a message to stderr: stdout is for data.

    A program that `tensortap run` ran may have closed it, which must not change the exit code.
    """
    try:
        if sys.stderr is not None:
            print(f"tensortap: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        sys.stderr = None  # else Python exits with 120


def json_option(fields: str) -> Any:
    """Return the option --json; its help names the fields that the command prints."""
    return typer.Option(False, "--json", help=f"Print JSON: {fields}.")


def print_json(value: Any) -> None:
    """Print a value as JSON; NaN and infinities become text, and non-ASCII is escaped."""
    import json

    from tensortap.text.json_values import as_json

    print(json.dumps(as_json(value), indent=1))


def parse_numbers(text: str, option: str, example: str) -> tuple[int, ...]:
    """Return the integers of ``0,3``; raise TensortapError, naming the option, if it is not that.

    >>> parse_numbers("0,3", "--ranks", "0,1")
    (0, 3)
    """
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise TensortapError(f"{option} must look like {example}, got {text!r}") from None


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], object]]:
    """Show a progress bar on stderr; yield a function of what is done and the total."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    hidden = not console.is_terminal  # a log file would get an empty line
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def wait_for_interrupt(what: str, alive: Callable[[], bool]) -> None:
    """Return at Ctrl-C or SIGTERM; exit with 1 if `what` ends by itself."""
    received: list[int] = []  # a handler must not take the lock of an event that is waited for
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    message("press Ctrl-C to end")
    while not received:
        time.sleep(0.2)
        if not received and not alive():
            message(f"{what} ended with an error")
            raise typer.Exit(1)
