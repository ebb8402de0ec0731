"""The protocol of everything that gives records back, and how one of them is found."""

from __future__ import annotations

import difflib
from typing import Protocol

from tensortap.errors import NotFound
from tensortap.record import Kind, Mapping, Record, Value


class Reader(Protocol):
    """Gives records back: from memory, from a live session, from a run on disk."""

    def names(self) -> list[str]:
        """All names, in the order in which they first came."""
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
        """The records of a name that fit, oldest to newest; their values may have to be loaded.

        `last` says that only so many of the newest of each rank are wanted; more may come.
        """
        ...

    def load(self, record: Record) -> Record:
        """The record with its value."""
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
    """The records that fit, oldest to newest; NotFound, with what there is, if none does.

    Alerts only where they are asked for, or where there is nothing else.
    """
    wanted_kind = _kind(kind)
    wanted_rank = None if rank == "all" or isinstance(rank, str) else rank
    found = reader.records(name, step=step, rank=wanted_rank, kind=wanted_kind, last=last)
    if not found:
        raise NotFound(_why_not(reader, name, step, wanted_rank, wanted_kind))
    if wanted_kind is None:
        # an alert about a tensor stands under its name, and is not what is asked for
        return [r for r in found if r.kind is not Kind.ALERT] or found
    return found


def _kind(kind: Kind | str | None) -> Kind | None:
    if kind is None:
        return None
    try:
        return Kind(kind.title())  # Gradient, and gradient
    except ValueError:
        kinds = ", ".join(k.value for k in Kind)
        raise NotFound(f"no kind is called {kind!r}; there is {kinds}") from None


def find(
    reader: Reader,
    name: str,
    index: int = 0,
    *,
    step: int | None = None,
    rank: int | None = None,
    kind: Kind | str | None = None,
) -> Record:
    """One record: `index` counts back from the latest of those that fit."""
    last = index + 1 if index >= 0 else None
    found = find_all(reader, name, step=step, rank=rank, kind=kind, last=last)
    held = sorted({r.rank for r in found})
    if len(held) > 1:
        raise NotFound(f"{name!r} is there of ranks {_few(held)}: say rank={held[0]} or rank='all'")
    kinds = sorted({r.kind.value for r in found})
    if len(kinds) > 1:
        raise NotFound(f"{name!r} is there as {' and '.join(kinds)}: say kind={kinds[0]!r}")
    if not -len(found) <= index < len(found):
        raise NotFound(f"{name!r} has {len(found)} captures, counted back from 0: no {index}")
    return found[-1 - index]


def value_of(record: Record) -> Value:
    """What a record is of: the tensor, where numbers about it are kept with it."""
    value = record.value
    if "stash" in record.tags and isinstance(value, Mapping):
        return dict(value.items).get("tensor", value)
    return value


def kept_value(record: Record) -> Value:
    """What a record is of; NotFound where nothing but its statistics was kept.

    None is a value that may have been caught: it does not stand for a tensor that is not there.
    """
    if record.value is None and record.stats is not None:
        raise NotFound(
            f"of {record.name!r} ({record.kind.value}, step {record.step}) only statistics were "
            f"kept: describe({record.name!r}) shows them, track(..., tensors=...) keeps values"
        )
    return value_of(record)


def _why_not(
    reader: Reader, name: str, step: int | None, rank: int | None, kind: Kind | None
) -> str:
    """Why nothing was found, and what there is instead."""
    found = reader.records(name)
    if not found:
        return _no_name(name, reader.names())
    if kind is not None:
        kinds = sorted({r.kind.value for r in found})
        found = [r for r in found if r.kind is kind]
        if not found:
            return f"no {kind.value} of {name!r}; there is {' and '.join(kinds)}"
    if rank is not None:
        held = sorted({r.rank for r in found})
        found = [r for r in found if r.rank == rank]
        if not found:
            word = "is rank" if len(held) == 1 else "are ranks"
            return f"no {name!r} of rank {rank}; there {word} {_few(held)}"
    steps = sorted({r.step for r in found})
    return f"no {name!r} at step {step}; {_nearest(step or 0, steps)}"


def _few(values: list[int]) -> str:
    shown = [str(value) for value in values[:8]]
    if len(values) > 8:
        return f"{', '.join(shown)} … {values[-1]}"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _nearest(step: int, steps: list[int]) -> str:
    below = [s for s in steps if s < step]
    above = [s for s in steps if s > step]
    near = [*below[-1:], *above[:1]]
    if len(near) == 1:
        return f"the nearest captured step is {near[0]}"
    return f"the nearest captured steps are {near[0]} and {near[1]}"


def _no_name(name: str, names: list[str]) -> str:
    if not names:
        return f"no {name!r}: nothing has been captured yet"
    near = difflib.get_close_matches(name, names, 3, 0.5) or [n for n in names if name in n][:3]
    if near:
        return f"no {name!r}; did you mean {' or '.join(repr(n) for n in near)}?"
    return f"no {name!r}; there are {len(names)} names, the first is {names[0]!r}"
