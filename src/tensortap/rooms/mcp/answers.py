"""Answers that a language model reads: bounded, quoted as JSON, without control characters.

Names, messages and notes were written by whoever wrote the run. They only appear as JSON values,
so that a reader can tell them from what tensortap itself says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tensortap.core.errors import TensortapError
from tensortap.core.files import plain
from tensortap.text.json_values import shallow_json

MOST_BYTES = 20_000  # of an answer: about 6,000 tokens
MOST_ROWS = 500  # that one call may ask for
# the longest text and the most entries of a container, until an answer fits
_BOUNDS = ((500, 60), (200, 30), (80, 15), (30, 6), (10, 2))


def answer(
    facts: dict[str, Any], rows: Sequence[Any] | None = None, offset: int = 0, limit: int = 50,
    row: Callable[[Any], Any] = lambda each: each,
) -> str:  # fmt: skip
    """Return facts as JSON, with as many of the rows from `offset` on as fit.

    `row` makes a row of an entry of `rows`; it is called only for those that are shown. What is
    left out is counted, with the offset to ask for it.

    >>> answer({"run": "a"}, [1, 2, 3], offset=1, limit=1)
    '{"run": "a", "total": 3, "rows": [2], "more": "1 more: ask again with offset=2"}'
    """
    if rows is None:
        return _encoded(_fitted(facts, MOST_BYTES))
    if offset < 0 or not 1 <= limit <= MOST_ROWS:
        raise TensortapError(
            f"offset must be at least 0 and limit from 1 to {MOST_ROWS}, got {offset} and {limit}"
        )
    made: dict[str, Any] = {**_fitted(facts, MOST_BYTES // 2), "total": len(rows), "rows": []}
    room = MOST_BYTES - len(_encoded(made).encode()) - 80  # for the last sentence
    for each in rows[offset : offset + limit]:
        cells = _fitted(row(each), room if not made["rows"] else MOST_BYTES)
        room -= len(_encoded(cells).encode()) + 2
        if room < 0:
            break
        made["rows"].append(cells)
    end = offset + len(made["rows"])
    if end < len(rows):
        made["more"] = f"{len(rows) - end:,} more: ask again with offset={end}"
    return _encoded(made)


def _fitted(value: Any, room: int) -> Any:
    """Return a value as JSON in so many bytes; if texts and containers were cut, it says so."""
    cells: Any = None
    for longest, most in _BOUNDS:
        cells = _cut(value, longest, most, 8)
        if isinstance(cells, dict) and longest != _BOUNDS[0][0]:
            cells["shortened"] = f"texts have {longest} characters, lists {most} entries"
        if len(_encoded(cells).encode()) <= room:
            break
    return cells


def _cut(value: Any, longest: int, most: int, depth: int) -> Any:
    """Return a value as JSON, without control characters and without what is too long."""
    if isinstance(value, int) and value.bit_length() > 64:
        value = f"integer of {value.bit_length():,} bits"
    value = plain(value, longest) if isinstance(value, str) else shallow_json(value)
    if not isinstance(value, (dict, list)):
        return value
    if not depth:
        return f"… {len(value):,} entries"
    more = [("…", f"{len(value) - most:,} more")] if len(value) > most else []
    if isinstance(value, list):
        shown = [_cut(each, longest, most, depth - 1) for each in value[:most]]
        return shown + ["… " + words for _, words in more]
    pairs = list(value.items())[:most]
    shown_pairs = [
        (_cut(str(k), longest, 0, 0), _cut(v, longest, most, depth - 1)) for k, v in pairs
    ]
    return dict(shown_pairs + more)


def _encoded(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
