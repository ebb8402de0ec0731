"""Regular expressions over names: the one place where patterns of users are compiled."""

from __future__ import annotations

import re

from tensortap.errors import PatternError


def compile_pattern(
    pattern: str | re.Pattern[str], argument: str = "", *, ignore_case: bool = False
) -> re.Pattern[str]:
    """Compile a regular expression; raise PatternError, naming the argument, if it is invalid.

    >>> bool(compile_pattern("^blocks").search("blocks.0"))
    True
    """
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, TypeError) as error:
        where = f"{argument}: " if argument else ""
        raise PatternError(f"{where}not a regular expression: {pattern!r} ({error})") from None
