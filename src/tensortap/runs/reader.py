"""The protocol of all readers, and the search for a record in one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Protocol

from tensortap.core.errors import NotFound
from tensortap.core.record import Kind, Mapping, Record, Value


class Reader(Protocol):
    """Returns records: from memory, from a live session, or from a run on disk."""

    def names(self) -> list[str]:
        """Return all names in the order of their first record."""
        ...

    def records(
        self,
        name: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        kind: Kind | None = None,
        last: int | None = None,
    ) -> list[Record]:
        """Return the records of a name, oldest first; their values may have to be loaded.

        With `last`, only so many of the newest of each rank are needed; the reader may return more.
        """
        ...

    def load(self, record: Record) -> Record:
        """Return the record with its value."""
        ...


def find_all(
    reader: Reader,
    name: str,
    *,
    step: int | None = None,
    rank: int | str | None = None,
    kind: Kind | str | None = None,
    last: int | None = None,
) -> list[Record]:
    """Return the matching records, oldest first; raise NotFound if there is none.

    Alerts are included only if `kind` says so, or if there is nothing else.
    """
    wanted_kind = None if kind is None else parse_kind(kind)
    wanted_rank = None if isinstance(rank, str) else rank  # "all"
    found = reader.records(name, step=step, rank=wanted_rank, kind=wanted_kind, last=last)
    if not found:
        raise NotFound(_why_not(reader, name, step, wanted_rank, wanted_kind))
    if wanted_kind is None:
        return [r for r in found if r.kind is not Kind.ALERT] or found
    return found


def parse_kind(kind: Kind | str) -> Kind:
    """Return the kind of a text in any case; raise NotFound if there is none."""
    try:
        return Kind(kind.title())  # accept "gradient" for "Gradient"
    except ValueError:
        kinds = ", ".join(k.value for k in Kind)
        raise NotFound(f"unknown kind {kind!r}; the kinds are {kinds}") from None


def find(
    reader: Reader,
    name: str,
    index: int = 0,
    *,
    step: int | None = None,
    rank: int | None = None,
    kind: Kind | str | None = None,
) -> Record:
    """Return one record: `index` counts back from the latest match."""
    last = index + 1 if index >= 0 else None
    found = find_all(reader, name, step=step, rank=rank, kind=kind, last=last)
    ranks = sorted({r.rank for r in found})
    if len(ranks) > 1:
        raise NotFound(f"{name!r} is on ranks {listed(ranks)}: pass rank={ranks[0]} or rank='all'")
    _check_one_kind(name, found)
    if not -len(found) <= index < len(found):
        raise NotFound(f"{name!r} has {len(found)} records: index {index} is out of range")
    return found[-1 - index]


def _check_one_kind(name: str, found: list[Record]) -> None:
    kinds = sorted({r.kind.value for r in found})
    if len(kinds) > 1:
        raise NotFound(f"{name!r} exists as {' and '.join(kinds)}: pass kind={kinds[0]!r}")


def find_parts(
    reader: Reader,
    name: str,
    index: int = 0,
    *,
    step: int | None = None,
    kind: Kind | str | None = None,
) -> list[Record]:
    """Return the newest record of each rank at one step: the `index`-th before the latest.

    Steps that some ranks have not reached yet do not count.
    """
    found = find_all(reader, name, step=step, kind=kind)
    _check_one_kind(name, found)
    by_step: dict[int, dict[int, Record]] = {}
    for record in found:
        by_step.setdefault(record.step, {})[record.rank] = record
    most = max(map(len, by_step.values()))
    steps = sorted(each for each, parts in by_step.items() if len(parts) == most)
    if not 0 <= index < len(steps):
        raise NotFound(
            f"{name!r} was recorded at {len(steps)} steps: index {index} is out of range"
        )
    return list(by_step[steps[-1 - index]].values())


def value_of(record: Record) -> Value:
    """Return the value of a record; of a stash that belongs to a tensor, only the tensor."""
    value = record.value
    if "stash" in record.tags and isinstance(value, Mapping):
        return dict(value.items).get("tensor", value)
    return value


def kept_value(record: Record) -> Value:
    """Return the value of a record; raise NotFound if only its statistics were kept.

    None may be the value that was captured: without statistics it is not a missing tensor.
    """
    if record.value is None and record.stats is not None:
        raise NotFound(
            f"only statistics of {record.name!r} ({record.kind.value}, step {record.step}) were "
            f"kept: describe({record.name!r}) shows them, track(..., tensors=...) keeps values"
        )
    return value_of(record)


def _why_not(
    reader: Reader, name: str, step: int | None, rank: int | None, kind: Kind | None
) -> str:
    """Return why nothing was found, and what exists instead."""
    found = reader.records(name)
    if not found:
        return _no_name(name, reader.names())
    if kind is not None:
        kinds = sorted({r.kind.value for r in found})
        found = [r for r in found if r.kind is kind]
        if not found:
            return f"no {kind.value} of {name!r}; it exists as {' and '.join(kinds)}"
    if rank is not None:
        ranks = sorted({r.rank for r in found})
        found = [r for r in found if r.rank == rank]
        if not found:
            word = "rank" if len(ranks) == 1 else "ranks"
            return f"no {name!r} on rank {rank}; it is on {word} {listed(ranks)}"
    return f"no {name!r} at step {step}; {nearest_steps(step or 0, {r.step for r in found})}"


def listed(values: Sequence[object]) -> str:
    """Return values as words: ``0, 1 and 2``."""
    shown = [str(value) for value in values[:8]]
    if len(values) > 8:
        return f"{', '.join(shown)} … {values[-1]}"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def nearest_steps(step: int, steps: set[int]) -> str:
    """Return which of some steps are nearest, in words."""
    below = [s for s in steps if s < step]
    above = [s for s in steps if s > step]
    if below and above:
        return f"the nearest captured steps are {max(below)} and {min(above)}"
    return f"the nearest captured step is {max(below) if below else min(above)}"


def _no_name(name: str, names: list[str]) -> str:
    if not names:
        return f"no {name!r}: nothing has been captured yet"
    return f"no {name!r}; {similar_names(name, names)}"


def similar_names(name: str, names: list[str]) -> str:
    """Return the names that somebody may have meant, in words.

    >>> similar_names("atn", ["attn", "mlp"])
    "did you mean 'attn'?"
    """
    near = difflib.get_close_matches(name, names, 3, 0.5) or [n for n in names if name in n][:3]
    if near:
        return f"did you mean {' or '.join(repr(n) for n in near)}?"
    return f"there are {len(names)} names, the first is {names[0]!r}"
