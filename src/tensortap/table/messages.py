"""Messages about names that a table does not have."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def no_such(what: str, wanted: str, available: Sequence[str]) -> str:
    """Return a message about an unknown name, with similar ones or what is available.

    >>> no_such("statistic", "rm3", ["rm2", "std"])
    "no statistic is called 'rm3'; did you mean 'rm2'?"
    """
    if not available:
        return f"no {what} is called {wanted!r}: there is none at all"
    similar = difflib.get_close_matches(wanted, available, 3, 0.6)
    similar = similar or [each for each in available if wanted.lower() in each.lower()][:3]
    if similar:
        return f"no {what} is called {wanted!r}; did you mean {' or '.join(map(repr, similar))}?"
    few = ", ".join(available[:8]) + (f" … ({len(available)})" if len(available) > 8 else "")
    return f"no {what} is called {wanted!r}; available: {few}"
