"""The paths of `trace`: segments between dots, ``*`` for any one, ``**`` for any number.

Only the standard library is imported here and in all that instruments functions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

ANY = "*"
MANY = "**"

_SEGMENT = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^."']+))\s*(?:\.|$)""")


def parse(path: str) -> tuple[str, ...]:
    """The segments of a path; a key that has dots in it stands in quotes.

    >>> parse("blocks.*.forward.out.'a.b'")
    ('blocks', '*', 'forward', 'out', 'a.b')
    """
    if not isinstance(path, str):
        raise TypeError(f"a path is a string like 'blocks.*.forward.x', not {path!r:.80}")
    segments: list[str] = []
    place = 0
    while place < len(path):
        found = _SEGMENT.match(path, place)
        if found is None or (found.group(3) is not None and not found.group(3).strip()):
            break
        segments.append(next(text for text in found.groups() if text is not None).strip())
        place = found.end()
    if place < len(path) or not segments or path.rstrip().endswith("."):
        raise ValueError(
            f"{path!r} is no path: segments between dots, like 'forward.x', 'blocks.*.forward.x'"
        )
    return tuple(segments)


def joined(segments: Iterable[str]) -> str:
    """The path of segments.

    >>> joined(("out", "a.b"))
    "out.'a.b'"
    """
    return ".".join([f"'{text}'" if "." in text else text for text in segments])


def fits(segment: str, name: str) -> bool:
    """Whether a segment of a pattern stands for a name.

    >>> fits("*", "q"), fits("q", "q"), fits("q", "k")
    (True, True, False)
    """
    return segment in (ANY, MANY, name)


def near(name: str, there: Iterable[str], most: int = 6) -> str:
    """What there is instead of a name, the most similar first.

    >>> near("score", ["q", "k", "scores"])
    "it has 'scores', 'q', 'k'"
    """
    names = list(dict.fromkeys(there))
    if not names:
        return "it has none"
    close = difflib.get_close_matches(name, names, n=most, cutoff=0.5)
    shown = [*close, *[other for other in names if other not in close]]
    more = " …" if len(shown) > most else ""
    return "it has " + ", ".join(repr(one) for one in shown[:most]) + more
