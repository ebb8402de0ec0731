"""What several commands have in common: ranges of steps, and a bar that shows progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tensortap.errors import TensortapError


def parse_steps(text: str | None) -> tuple[int | None, int | None] | None:
    """The first and the last step of ``10:20``, ``10:``, ``:20`` or ``10``."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else None
        high = (int(last) if last else None) if colon else low
    except ValueError:
        raise TensortapError(f"--steps is like 10:20, not {text!r}") from None
    if low is not None and high is not None and low > high:
        raise TensortapError(f"--steps {text}: there is no step between them")
    return low, high


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], object]]:
    """A bar on stderr, gone when it is done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    hidden = not console.is_terminal  # a log would get an empty line
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
