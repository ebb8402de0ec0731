"""Compare two digests: which weights did not arrive, and what is there instead."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensortap.core.errors import TensortapError
from tensortap.rooms.align.digest import SUFFIX, Digest, DigestRow, load_digest
from tensortap.rooms.align.layouts import (
    Pair,
    are_equal,
    digests_of,
    match_rows,
    shared_dtype,
)

GOOD = ("equal", "cast", "tied")
"""States of weights that have arrived."""


@dataclass(frozen=True, slots=True)
class WeightState:
    """The state of some weights: `names` of the first digest, `others` of the second.

    `state` is equal, cast (equal after rounding to a dtype), tied (missing, but equal to another
    tensor of its side), earlier (those of an earlier version), differ, missing, or unknown.
    """

    names: tuple[str, ...]
    others: tuple[str, ...]
    state: str
    note: str = ""
    version: int | None = None

    def __str__(self) -> str:
        names = " + ".join(self.names) or "nothing"
        others = " + ".join(self.others)
        both = names if self.names == self.others or not others else f"{names} → {others}"
        return f"{both}: {self.note or self.state}"


@dataclass(frozen=True, repr=False)
class WeightsReport:
    """The result of comparing two digests; true if all weights have arrived."""

    a: str
    b: str
    states: tuple[WeightState, ...]

    def __bool__(self) -> bool:
        return all(each.state in GOOD for each in self.states)

    @property
    def wrong(self) -> tuple[WeightState, ...]:
        """Return what has not arrived, in the order of the first digest."""
        return tuple(each for each in self.states if each.state not in GOOD)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "format": 1, "of": "digests", "agree": bool(self), "a": self.a, "b": self.b,
            "weights": [dataclasses.asdict(each) for each in self.states],
        }  # fmt: skip

    @property
    def line(self) -> str:
        """Return the verdict in one line."""
        states = collections.Counter(each.state for each in self.states)
        fine = f"{len(self.states) - len(self.wrong):,} of {len(self.states):,} weights agree"
        if states["cast"]:
            fine += f", {states['cast']:,} of them after a cast"
        wrong = [f"{states[each]:,} {words}" for each, words in _WORDS.items() if states[each]]
        return ", ".join([fine, *wrong])

    def __repr__(self) -> str:
        lines = [f"<{self.line}>", *(f"  {each}" for each in self.wrong[:20])]
        more = len(self.wrong) - 20
        return "\n".join(lines + [f"  … and {more:,} more"] * (more > 0))


_WORDS = {
    "differ": "differ", "earlier": "are those of an earlier version", "missing": "are missing",
    "unknown": "cannot be compared",
}  # fmt: skip


def compare_digests(
    a: Digest | str | Path,
    b: Digest | str | Path,
    *,
    names: str | Sequence[str | tuple[str, str]] = (),
    layout: Mapping[str, Sequence[str]] | None = None,
) -> WeightsReport:
    r"""Compare the weights of two models by their digests, or by files with them.

    `names` rename those of the first as ``r"h\.(\d+)=layers.\1"`` does; `layout` adds fused
    modules: ``{"qkv": ("q", "k", "v")}``. Prefixes and common names are found.

    >>> import numpy as np
    >>> from tensortap.rooms.align.digest import digest
    >>> w = np.ones((4, 2), np.float32)
    >>> compare_digests(digest({"w": w, "b": w[0]}), digest({"m.w": w, "m.b": w[1] * 2}))
    <1 of 2 weights agree, 1 differ>
      b → m.b: differ
    """
    one = load_digest(a) if isinstance(a, (str, Path)) else a
    other = load_digest(b) if isinstance(b, (str, Path)) else b
    renames = (names,) if isinstance(names, str) else names
    states = [_state(one, other, pair) for pair in match_rows(one, other, renames, layout)]
    return WeightsReport(_title(one), _title(other), tuple(states))


def _title(digest: Digest) -> str:
    number = "" if digest.version is None else f"version {digest.version} of "
    return f"{number}{digest.source}"


def _state(a: Digest, b: Digest, pair: Pair) -> WeightState:
    if not pair.a or not pair.b:
        return _lone(a, b, pair)
    one, other = [a.rows[name] for name in pair.a], [b.rows[name] for name in pair.b]
    unread = next((row.unread for row in (*one, *other) if row.unread), "")
    if unread:
        return WeightState(*pair, "unknown", unread)
    shapes = one[0].shape, other[0].shape
    if len(pair.a) == len(pair.b) == 1 and shapes[0] != shapes[1]:
        if shapes[0] == shapes[1][::-1] and len(shapes[0]) == 2:
            return _transposed(pair, one[0], other[0])
        # rows of zeros add nothing to a digest: a vocabulary is often padded
        if shapes[0][1:] != shapes[1][1:] or not are_equal(one, other):
            note = f"shapes {list(shapes[0])} and {list(shapes[1])}"
            return WeightState(*pair, "differ", note)
    dtype = shared_dtype(one, other)
    if dtype is None:
        dtypes = [sorted({row.dtype for row in rows}) for rows in (one, other)]
        note = f"no cast leads from {' and '.join(dtypes[0])} to {' and '.join(dtypes[1])}"
        return WeightState(*pair, "unknown", note)
    if are_equal(one, other):
        if {row.dtype for row in one} == {row.dtype for row in other}:
            is_padded = len(pair.a) == len(pair.b) and shapes[0] != shapes[1]
            return WeightState(*pair, "equal", "padded with zeros" if is_padded else "")
        return WeightState(*pair, "cast", f"equal after a cast to {dtype}")
    return _earlier(a, b, pair, one, other) or WeightState(*pair, "differ")


def _lone(a: Digest, b: Digest, pair: Pair) -> WeightState:
    """Describe a tensor that one side lacks, which may be tied to another one of its side."""
    digest, side = (a, "second") if pair.a else (b, "first")
    (name,) = pair.a or pair.b
    row = digest.rows[name]
    # zeros, and ones of norms, are equal without being tied
    may_be_tied = len(row.shape) > 1 and row.digest.strip("0")
    for other, tied in digest.rows.items() if may_be_tied else ():
        same = tied.digest == row.digest and (tied.dtype, tied.shape) == (row.dtype, row.shape)
        if other != name and same:
            return WeightState(*pair, "tied", f"tied to {other}")
    return WeightState(*pair, "missing", f"the {side} lacks it")


def _transposed(pair: Pair, a: DigestRow, b: DigestRow) -> WeightState:
    for row, other in ((a, b), (b, a)):
        plain = digests_of([other])
        shared = [dtype for dtype in row.transposed if dtype in plain]
        # the coarsest of both, which is that of one of them
        for dtype in [each for each in shared if each in (a.dtype, b.dtype)][:1]:
            if row.transposed[dtype] == plain[dtype]:
                return WeightState(*pair, "equal" if a.dtype == b.dtype else "cast", "transposed")
            return WeightState(*pair, "differ", "differ, transposed")
    note = "the shapes are transposed: digest one side with transposed=True"
    return WeightState(*pair, "unknown", note)


def _earlier(
    a: Digest, b: Digest, pair: Pair, one: list[DigestRow], other: list[DigestRow]
) -> WeightState | None:
    """Return which earlier version of one side the other has."""
    sides = ((a, pair.a, one, other, "second"), (b, pair.b, other, one, "first"))
    for digest, names, rows, held, side in sides:
        for past in digest.history:
            then = [past.rows.get(name) for name in names]
            old = [row for row in then if row is not None]
            if len(old) < len(names):
                continue
            which = "an earlier version" if past.version is None else f"version {past.version}"
            parts = enumerate(names if len(names) > 1 else ())  # perhaps one of them is old
            tried = [
                (f"{name} of {which}", [*rows[:i], old[i], *rows[i + 1 :]]) for i, name in parts
            ]
            for words, mixed in [*tried, (f"that of {which}", old)]:
                if are_equal(mixed, held):
                    return WeightState(*pair, "earlier", f"the {side} has {words}", past.version)
    return None


class DigestKind:
    """The digests that `tap.compare` hands to this room."""

    def accepts(self, value: object) -> bool:
        """Return whether a value is a digest, or the name of a file with one."""
        if isinstance(value, (str, Path)):
            return str(value).endswith(SUFFIX)
        return isinstance(value, Digest)

    def compare(self, a: Any, b: Any, **options: Any) -> WeightsReport:
        """Compare two digests."""
        for side in (a, b):
            if not self.accepts(side):
                raise TensortapError(
                    f"a digest can only be compared with a digest, got {side!r:.80}"
                )
        return compare_digests(a, b, **options)


DIGESTS = DigestKind()
