"""Rooms: the capabilities that plug into tensortap, found through entry points.

A room is one folder, or another package, that describes itself with a `Room` and names it in its
``pyproject.toml``::

    [project.entry-points."tensortap.rooms"]
    compare = "tensortap.rooms.compare.room:ROOM"

A description holds addresses, ``"module:name"``: nothing of a room is imported before it is used.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensortap.core.errors import MissingRoom

log = logging.getLogger("tensortap")

GROUP = "tensortap.rooms"

Address = str
"""Where an object is: ``"module:name"``."""


@dataclass(frozen=True, slots=True)
class Tab:
    """A tab of the page: the file below the room's folder ``static`` that exports ``tab``."""

    file: str
    order: int
    """Tabs are sorted by this number; those of tensortap have multiples of ten."""


@dataclass(frozen=True, slots=True)
class Room:
    """One capability: everything that it adds to tensortap."""

    name: str
    needs: tuple[str, ...] = ()
    """Rooms that this one imports."""
    commands: Mapping[str, Address] = field(default_factory=dict)
    """Functions that `typer` turns into commands of ``tensortap``, by name."""
    tabs: tuple[Tab, ...] = ()
    routes: Address | None = None
    """A list of `PageRoute`: requests that the page answers."""
    rules: Address | None = None
    """A list of alert rules that ``alerts=True`` uses, too."""
    offers: Mapping[str, Address] = field(default_factory=dict)
    """Objects for the extension points of the spine and of other rooms, by name."""


def load(address: Address) -> Any:
    """Import an object by its address; without a name it is the module."""
    module, _, name = address.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@functools.cache
def rooms() -> Mapping[str, Room]:
    """Return the rooms that are installed, by name; log those that cannot be imported."""
    from importlib.metadata import entry_points  # a third of the time of `import tensortap`

    found: dict[str, Room] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            room = entry.load()
            if not isinstance(room, Room):
                raise TypeError(f"{entry.value} must be a tensortap.Room, got {room!r:.80}")
        except Exception as error:  # somebody else's package
            log.warning("tensortap: the room %r cannot be used: %s", entry.name, error)
            continue
        found[room.name] = room
    return found


def folder_of(room: str) -> str:
    """Return the package in which a room describes itself."""
    from importlib.metadata import entry_points

    entry = next(each for each in entry_points(group=GROUP) if each.name == room)
    return str(entry.module).rpartition(".")[0]


def offers(point: str) -> Iterator[Any]:
    """Yield what the rooms offer for an extension point."""
    for room in rooms().values():
        if point in room.offers:
            yield load(room.offers[point])


def offer(point: str) -> Any:
    """Return what a room offers for an extension point; raise `MissingRoom` if none does."""
    for found in offers(point):
        return found
    raise MissingRoom(f"no installed room offers {point!r}: install tensortap again")


def lazy(package: str, names: Mapping[str, Address]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that imports each of its names when it is used."""

    def __getattr__(name: str) -> Any:  # noqa: N807 - what modules call it
        if name not in names:
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[package])  # for "Did you mean"
        found = load(names[name])
        setattr(sys.modules[package], name, found)
        return found

    return __getattr__
