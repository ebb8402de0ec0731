"""Show the examples in docstrings as code: griffe hands docstrings over as plain Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

# an example starts with >>> and ends at an empty line
EXAMPLE = re.compile(r"(?:^[ ]*>>> .*\n?(?:^[ ]*\S.*\n?)*)+", re.MULTILINE)


class FenceDoctests(griffe.Extension):
    """Put every doctest into a fenced block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            text = EXAMPLE.sub(r"```pycon\n\g<0>\n```\n", obj.docstring.value)
            obj.docstring.value = text
