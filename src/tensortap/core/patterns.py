"""Regular expressions over names: the one place where patterns of users are compiled.

Patterns in a program are those of Python. Patterns that are typed into a page or a notebook are
those of RE2, whose time grows only linearly and which lets other threads run: the page may be
served by the training process, which a pattern that backtracks would stop for minutes.
"""

from __future__ import annotations

import re
from typing import Any

from tensortap.core.errors import PatternError

_MAX_LENGTH = 1000  # characters of a typed pattern


def compile_pattern(
    pattern: str | re.Pattern[str], argument: str = "", *, ignore_case: bool = False
) -> re.Pattern[str]:
    """Compile a regular expression; raise PatternError, naming the argument, if it is invalid."""
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        where = f"{argument}: " if argument else ""
        given = f"{pattern!r:.200}"
        raise PatternError(f"{where}not a regular expression: {given} ({error})") from None


class TypedPattern:
    """A regular expression that somebody typed, in the syntax of RE2.

    It has no lookaround and no backreferences, and repetitions up to 1,000.
    """

    def __init__(self, text: str, *, ignore_case: bool = False) -> None:
        import re2

        if len(text) > _MAX_LENGTH:
            raise PatternError(
                f"a pattern has at most {_MAX_LENGTH:,} characters, got {len(text):,}"
            )
        options = re2.Options()
        options.log_errors = False
        options.never_capture = True
        options.case_sensitive = not ignore_case
        try:
            self._compiled: Any = re2.compile(text, options)
        except (re2.error, UnicodeEncodeError) as error:
            reason = error.args[0]
            reason = reason.decode(errors="replace") if isinstance(reason, bytes) else str(error)
            raise PatternError(
                f"not a regular expression: {text!r} ({reason}); lookaround, backreferences and "
                "repetitions above 1,000 are not supported here"
            ) from None

    def search(self, name: str) -> bool:
        return self._compiled.search(name.encode("utf-8", "replace")) is not None
