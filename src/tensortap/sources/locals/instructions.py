"""Functions whose source is not at hand, on Python 3.10 and 3.11: probes among instructions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tensortap.sources.locals.rewrite import NoSource
from tensortap.sources.locals.wanted import Wanted

if TYPE_CHECKING:
    from tensortap.sources.locals.calls import Site


class FromInstructions:
    """Code with probes put between the instructions."""

    def put(self, site: Site, wanted: Wanted) -> None:
        """Give the function code with probes in it."""
        if sys.version_info >= (3, 12):
            raise NoSource("for this Python there is sys.monitoring")
        raise NoSource("not yet")

    def remove(self, site: Site) -> None:
        """Give the function its own code back."""
        site.function.__code__ = site.original
