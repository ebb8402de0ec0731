"""Functions whose source is not at hand, on Python 3.12 and later: `sys.monitoring`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tensortap.sources.locals.rewrite import NoSource
from tensortap.sources.locals.wanted import Wanted

if TYPE_CHECKING:
    from tensortap.sources.locals.calls import Site


class Monitored:
    """Events of the interpreter, for the one code object alone."""

    def put(self, site: Site, wanted: Wanted) -> None:
        """Ask for the events of the function."""
        if sys.version_info < (3, 12):
            raise NoSource("this Python has no sys.monitoring")
        raise NoSource("sys.monitoring is not used yet")

    def remove(self, site: Site) -> None:
        """Ask for no more of them."""
