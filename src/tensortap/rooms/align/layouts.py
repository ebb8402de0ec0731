"""Match the weights of two models whose names and layouts differ: prefixes, fused and tied tensors.

`WeightNames` matches names; `match_rows` finds which rows of one digest are those of the other.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tensortap.core.errors import TensortapError
from tensortap.rooms.align.digest import Digest, DigestRow, as_sums, as_text
from tensortap.rooms.align.rows import concatenated, rows_and_length

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The usual names of fused modules, and of their parts in order."""

_MOST_PARTS = 2048  # of one fused tensor: the experts of a layer


class Pair(NamedTuple):
    """Names in both digests that hold the same weights; several are concatenated."""

    a: tuple[str, ...]
    b: tuple[str, ...]


class WeightNames:
    """Names of one model as the other spells them.

    `names` are patterns with replacements for names of the first, prefixes are found.

    >>> found = WeightNames(["model.h.0.w", "model.norm.w"], ["h.0.w", "norm.w", "x"])
    >>> found("model.h.0.w")
    'h.0.w'
    """

    def __init__(
        self, a: Iterable[str], b: Iterable[str], names: Sequence[str | tuple[str, str]] = ()
    ) -> None:
        from tensortap.rooms.compare.matching import parse_mapping

        self._renames = [parse_mapping(each) if isinstance(each, str) else each for each in names]
        self._known = set(b)
        renamed = [self._renamed(name) for name in a]
        self._old, self._new = _prefixes(renamed, self._known)

    def _renamed(self, name: str) -> str:
        for pattern, replacement in self._renames:
            name = re.sub(pattern, replacement, name)
        return name

    def __call__(self, name: str) -> str:
        """Return a name of the first model as the second one spells it."""
        name = self._renamed(name)
        if name not in self._known and name.startswith(self._old):
            return self._new + name[len(self._old) :]
        return name


def _prefixes(a: list[str], b: set[str]) -> tuple[str, str]:
    """Return the prefix of most names in `a` that have no equal, and that of theirs in `b`."""
    endings: dict[str, list[str]] = collections.defaultdict(list)
    for name in b:
        for start in _starts(name):
            endings[name[start:]].append(name)
    votes: collections.Counter[tuple[str, str]] = collections.Counter()
    for name in a:
        if name in b:
            continue
        for start in _starts(name):
            others = endings.get(name[start:], ())
            if len(others) == 1:
                votes[name[:start], others[0].removesuffix(name[start:])] += 1
            if others:
                break
    return votes.most_common(1)[0][0] if votes else ("", "")


def _starts(name: str) -> list[int]:
    """Return where the components of a name start."""
    return [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]


def check_layout(layout: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """Return the fused modules that are known, with those of the user."""
    found = dict(FUSED)
    for fused, parts in (layout or {}).items():
        if isinstance(parts, str) or not all(isinstance(part, str) for part in parts):
            raise TensortapError(
                f"layout must map fused names to their parts in order, such as "
                f"{{'qkv_proj': ('q_proj', 'k_proj', 'v_proj')}}; got {parts!r} for {fused!r}"
            )
        found[fused] = tuple(parts)
    return found


def digests_of(rows: Sequence[DigestRow]) -> dict[str, str]:
    """Return the digest of rows one after the other, by each dtype that all of them have."""
    if any(row.unread for row in rows):
        return {}
    forms = [{row.dtype: row.digest, **row.casts} for row in rows]
    if len(forms) == 1:
        return forms[0]
    counts = [rows_and_length(row.shape)[0] for row in rows]
    return {
        dtype: as_text(
            concatenated(
                (as_sums(form[dtype]), count) for form, count in zip(forms, counts, strict=True)
            )
        )
        for dtype in forms[0]
        if all(dtype in form for form in forms)
    }


def shared_dtype(a: Sequence[DigestRow], b: Sequence[DigestRow]) -> str | None:
    """Return the dtype in which both can be compared: that of one of them, if there is one."""
    own = {row.dtype for row in a}, {row.dtype for row in b}
    for dtypes, others in (own, own[::-1]):
        if len(dtypes) == 1 and (dtype := next(iter(dtypes))):
            rows = b if others is own[1] else a
            if all(dtype == row.dtype or dtype in row.casts for row in rows):
                return dtype
    return None


def are_equal(a: Sequence[DigestRow], b: Sequence[DigestRow]) -> bool:
    """Return whether both sides hold the same weights, perhaps after a cast."""
    dtype = shared_dtype(a, b)
    if dtype is None or not (one := digests_of(a)) or not (other := digests_of(b)):
        return False
    return one.get(dtype) == other.get(dtype)


def match_rows(
    a: Digest,
    b: Digest,
    names: Sequence[str | tuple[str, str]] = (),
    layout: Mapping[str, Sequence[str]] | None = None,
) -> list[Pair]:
    """Return which names belong together: by name, by the layout of fused modules, by content.

    Names that only one side has come last, with nothing on the other side.
    """
    return _Matcher(a, b, names, check_layout(layout)).pairs()


class _Matcher:
    """Take names that belong together out of two lists, the surest first."""

    def __init__(
        self,
        a: Digest,
        b: Digest,
        names: Sequence[str | tuple[str, str]],
        layout: dict[str, tuple[str, ...]],
    ) -> None:
        self.rows = a.rows, b.rows
        self.left = dict.fromkeys(a.rows), dict.fromkeys(b.rows)
        self.layout = layout
        self.spelled = WeightNames(a.rows, b.rows, names)
        self.alias = {self.spelled(name): name for name in a.rows}
        self.found: list[Pair] = []

    def pairs(self) -> list[Pair]:
        for name in list(self.left[0]):
            if (other := self.spelled(name)) in self.left[1]:
                shape = self.rows[1][other].shape  # perhaps transposed
                if self.rows[0][name].shape in (shape, shape[::-1]):
                    self.take((name,), (other,))
        for side in (1, 0):
            for name in list(self.left[side]):
                self.take_fused(side, name, self.named_parts(side, name))
        self.take_equal()
        for side in (1, 0):
            for name in list(self.left[side]):
                self.take_fused(side, name, self.run_of_parts(side, name))
        for name in list(self.left[0]):  # of other shapes
            if (other := self.spelled(name)) in self.left[1]:
                self.take((name,), (other,))
        lone = [Pair((name,), ()) for name in self.left[0]]
        return [*self.found, *lone, *(Pair((), (name,)) for name in self.left[1])]

    def take(self, a: tuple[str, ...], b: tuple[str, ...]) -> None:
        self.found.append(Pair(a, b))
        for left, names in zip(self.left, (a, b), strict=True):
            for name in names:
                left.pop(name, None)

    def take_fused(self, side: int, name: str, parts: tuple[str, ...]) -> None:
        if parts and side == 1:
            self.take(parts, (name,))
        elif parts:
            self.take((name,), parts)

    def named_parts(self, side: int, name: str) -> tuple[str, ...]:
        """Return the parts of a fused tensor on the other side, by the names of modules."""
        spelled = name if side else self.spelled(name)
        *path, module, last = ["", *spelled.split(".")] if "." in spelled else ["", "", spelled]
        other = self.left[1 - side]
        for fused, parts in self.layout.items():
            if module != fused and last != fused:
                continue
            ends = [f"{part}.{last}" if module == fused else f"{module}.{part}" for part in parts]
            names = [".".join([*path[1:], end]).lstrip(".") for end in ends]
            if side:
                names = [self.alias.get(each, "") for each in names]
            if all(each in other for each in names) and self.adds_up(side, name, names):
                return tuple(names)
        return ()

    def adds_up(self, side: int, name: str, parts: Sequence[str]) -> bool:
        """Return whether parts have the length of a fused tensor's rows, and their number."""
        rows, length = rows_and_length(self.rows[side][name].shape)
        sizes = [rows_and_length(self.rows[1 - side][part].shape) for part in parts]
        return all(size[1] == length for size in sizes) and sum(size[0] for size in sizes) == rows

    def take_equal(self) -> None:
        """Take what has other names, but the same shape and digest."""
        known: tuple[dict[Any, list[str]], dict[Any, list[str]]]
        known = collections.defaultdict(list), collections.defaultdict(list)
        for side, left in enumerate(self.left):
            for name in left:
                row = self.rows[side][name]
                for dtype, digest in digests_of([row]).items():
                    known[side][row.shape, dtype, digest].append(name)
        for key, names in known[0].items():
            others = known[1].get(key, [])
            # of several equal tensors, such as ones, nobody knows which is which
            if len(names) == len(others) and names[0] in self.left[0] and others[0] in self.left[1]:
                if are_equal([self.rows[0][names[0]]], [self.rows[1][others[0]]]):
                    for pair in zip(names, others, strict=True):
                        self.take((pair[0],), (pair[1],))

    def run_of_parts(self, side: int, name: str) -> tuple[str, ...]:
        """Return tensors of the other side in a row whose concatenation has the digest of one."""
        row = self.rows[side][name]
        rows, length = rows_and_length(row.shape)
        names, table = list(self.left[1 - side]), self.rows[1 - side]
        sizes = {each: rows_and_length(table[each].shape) for each in names}
        names = [each for each in names if sizes[each][1] == length and row.shape]
        for start in range(len(names)):
            total, end = 0, start
            while total < rows and end < len(names) and end - start < _MOST_PARTS:
                total += sizes[names[end]][0]
                end += 1
            chosen = names[start:end]
            if total == rows and len(chosen) > 1:
                if are_equal([row], [table[each] for each in chosen]):
                    return tuple(chosen)
        return ()
