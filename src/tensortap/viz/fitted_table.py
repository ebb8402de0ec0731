"""Tables with as many columns as the terminal has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table


class FittedTable:
    """A rich table that is built when it is printed, for the width of the console.

    >>> from rich.console import Console
    >>> from rich.table import Table
    >>> Console(width=40).print(FittedTable(lambda width: Table(f"{width} wide", box=None)))
    40 wide
    """

    def __init__(self, build: Callable[[int], Table]) -> None:
        self.build = build

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self.build(options.max_width)
