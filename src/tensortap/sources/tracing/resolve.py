"""Paths against a target: which functions to look into, for which names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

from tensortap.sources.tracing.functions import (
    Common,
    Found,
    arguments_of,
    attribute,
    methods,
    names_of,
    nested,
    of_class,
    plain,
)
from tensortap.sources.tracing.paths import ANY, MANY, joined, near

RETURN = "return"


@dataclass(frozen=True, eq=False)
class Place:
    """A function in the calls of which something is wanted.

    `this` is the object that it has to be called on, `caller` the place that has to have called
    it, None where that does not matter.
    """

    found: Found
    path: tuple[str, ...]
    caller: Place | None = None

    @property
    def label(self) -> str:
        """How it is called in messages."""
        return joined(self.path) or self.found.function.__qualname__


@dataclass(frozen=True, eq=False)
class Point:
    """One name in one function (None: what it returns), and where to go inside its value."""

    place: Place
    chain: tuple[str, ...]  # the functions inside the function, one in another
    name: str | None
    key: tuple[str, ...]
    deep: tuple[str, ...]


class Resolver:
    """Finds what paths stand for, in one target.

    `children` gives the parts of an object that are searched like it; methods that are `common`
    are not meant by ``*``; `closed` says why the functions of an object can't be looked into.
    """

    def __init__(
        self,
        target: Any,
        children: Callable[[Any], Mapping[str, Any]],
        common: Common | None = None,
        closed: Callable[[Any], str | None] = lambda owner: None,
    ) -> None:
        self.target = target
        self._children = children
        self._common = common
        self._closed = closed
        self._places: dict[tuple[int, int, int, tuple[str, ...]], Place] = {}
        self._misses: list[tuple[int, str]] = []
        self._there: dict[str, None] = {}  # what ``**`` has come across

    def resolve(self, segments: tuple[str, ...]) -> tuple[list[Point], str]:
        """The points that a path stands for; if there are none, why."""
        self._misses, self._there = [], {}
        found = plain(self.target) if callable(self.target) else None
        if (why := self._closed(self.target)) is not None and not self._children(self.target):
            return [], why
        if inspect.isroutine(self.target) and found is None:
            return [], f"{self.target!r} is not written in Python: it has no locals to see"
        if found is not None and not self._children(self.target):
            points = list(self._in_function(self._place(found, ()), segments))
        else:
            points = list(self._in_object(self.target, segments, (), set()))
        unique = {(point.key, point.deep): point for point in points}
        return list(unique.values()), "" if unique else self._why(segments)

    def _why(self, segments: tuple[str, ...]) -> str:
        """Why there is nothing, said of the place that the path came farthest to."""
        if MANY in segments[:-1]:
            wanted = segments[len(segments) - segments[::-1].index(MANY) :]
            if wanted and wanted[0] not in (*self._there, ANY, RETURN):
                return f"nothing there is called {wanted[0]!r}; {near(wanted[0], self._there)}"
        return max(self._misses, key=lambda miss: miss[0])[1] if self._misses else "nothing matches"

    def _place(self, found: Found, path: tuple[str, ...], caller: Place | None = None) -> Place:
        # one module under two names: two places, and both are told
        key = (id(found.function), id(found.this), id(caller), path)
        known = self._places.get(key)
        if known is None:
            known = self._places[key] = Place(found, path, caller)
        return known

    def _miss(self, path: tuple[str, ...], text: str) -> None:
        self._misses.append((len(path), text))

    # -- objects -------------------------------------------------------------------------

    def _in_object(
        self, owner: Any, segments: tuple[str, ...], path: tuple[str, ...], around: set[int]
    ) -> Iterator[Point]:
        if id(owner) in around:
            return  # an object that contains itself
        around = around | {id(owner)}
        children = self._children(owner)
        closed = self._closed(owner)
        if closed is not None and not (segments and segments[0] in (*children, ANY, MANY)):
            self._miss((*path, *segments[:1]), f"{joined(path) or 'the model'}: {closed}")
            return
        if not segments:
            name = "forward" if self._method(owner, "forward") is not None else "__call__"
            found = self._method(owner, name)
            if found is None:
                self._miss(path, f"{joined(path)} is no function and no module")
            else:
                here = path or (name,)  # the target itself has no name
                yield Point(self._place(found, here), (), None, here, ())
            return
        first, rest = segments[0], segments[1:]
        if first == MANY:
            self._there.update(dict.fromkeys(children))
            self._there.update((name, None) for name, _ in methods(owner, self._common))
            yield from self._in_object(owner, rest, path, around - {id(owner)})
            for name, child in children.items():
                yield from self._in_object(child, segments, (*path, name), around)
            for name, found in methods(owner, self._common):
                if rest:
                    yield from self._in_function(
                        self._place(found, (*path, name)), rest, quiet=True
                    )
        elif first == ANY:
            for name, child in children.items():
                yield from self._in_object(child, rest, (*path, name), around)
            for name, found in methods(owner, self._common):
                yield from self._in_function(self._place(found, (*path, name)), rest, quiet=True)
        else:
            yield from self._named(owner, children, first, rest, path, around)

    def _named(
        self,
        owner: Any,
        children: Mapping[str, Any],
        name: str,
        rest: tuple[str, ...],
        path: tuple[str, ...],
        around: set[int],
    ) -> Iterator[Point]:
        here = (*path, name)
        if name in children:
            yield from self._in_object(children[name], rest, here, around)
            return
        found = self._method(owner, name)
        if found is not None:
            yield from self._in_function(self._place(found, here), rest)
            return
        part = _part(owner, name)
        if part is not None and rest:
            yield from self._in_object(part, rest, here, around)
            return
        own = [method for method, _ in methods(owner, self._common)]
        where = joined(path) or type(owner).__name__
        if part is not None:
            said = f"{joined(here)} is a value, no function"
            if own:
                by = "forward" if "forward" in own else own[0]
                this = self._first_argument(owner, by)
                said += f": its value at each call is {joined((*path, by, this, name))!r}"
            self._miss(here, said)
        elif hasattr(type(owner), name):
            self._miss(here, f"{joined(here)} is not a function written in Python")
        else:
            there = near(name, [*children, *own])
            self._miss(here, f"no module or method {name!r} in {where}; {there}")

    def _first_argument(self, owner: Any, name: str) -> str:
        found = self._method(owner, name)
        return next(iter(arguments_of(found.function.__code__)), "") if found is not None else ""

    def _method(self, owner: Any, name: str) -> Found | None:
        if isinstance(owner, type):
            found = attribute(owner, name)
            return None if found is None else of_class(found, owner, name)
        own = getattr(owner, "__dict__", {}).get(name)
        if own is not None:  # a function that an object holds is called without it
            return plain(own, None, name) if callable(own) else None
        found = attribute(owner, name)
        return None if found is None else plain(found, owner, name)

    # -- functions -----------------------------------------------------------------------

    def _in_function(
        self, place: Place, segments: tuple[str, ...], quiet: bool = False
    ) -> Iterator[Point]:
        code = place.found.function.__code__
        yield from self._in_code(place, code, (), segments, place.path, quiet)

    def _in_code(
        self,
        place: Place,
        code: CodeType,
        chain: tuple[str, ...],
        segments: tuple[str, ...],
        path: tuple[str, ...],
        quiet: bool,
    ) -> Iterator[Point]:
        if not segments:
            yield Point(place, chain, None, path or (RETURN,), ())
            return
        first, rest = segments[0], segments[1:]
        names = names_of(code)
        if quiet:
            self._there.update(dict.fromkeys(names))
        if first == RETURN:
            yield Point(place, chain, None, (*path, RETURN), rest)
        elif first in (ANY, MANY):
            if first == MANY:
                deep = segments if rest else ()
                yield from self._in_code(place, code, chain, rest, path, True)
            else:
                deep = rest
            # not the whole object itself: that would be a copy of the model at each call
            without = not deep and not chain and place.found.this is not None
            this = code.co_varnames[:1] if without else ()
            for name in names if not quiet else ():
                if name not in this:
                    yield Point(place, chain, name, (*path, name), deep)
        elif (inside := _inside(code, first, names, rest)) is not None:
            yield from self._in_code(place, inside, (*chain, first), rest, (*path, first), quiet)
        elif first in names:
            yield Point(place, chain, first, (*path, first), rest)
        elif not quiet and (helper := _helper(place, first, rest)) is not None:
            found, taken = helper
            called = self._place(found, (*path, first, *rest[:taken]), place)
            yield from self._in_function(called, rest[taken:])
        elif not quiet:
            where = joined((*place.path, *chain)) or place.label
            self._miss(path, f"no local {first!r} in {where}; {near(first, names)}")


def items(owner: Any) -> Mapping[str, Any]:
    """What a list or a dict holds, by index or key; other objects hold nothing.

    >>> items([[], None])
    {'0': [], '1': None}
    """
    if isinstance(owner, Mapping):
        return {str(key): item for key, item in owner.items()}
    if isinstance(owner, (list, tuple)):
        return {str(index): item for index, item in enumerate(owner)}
    return {}


def _inside(
    code: CodeType, name: str, names: Sequence[str], rest: tuple[str, ...]
) -> CodeType | None:
    """A function defined inside, by ``def`` or as a lambda that is given that name."""
    found = nested(code, name)
    if found is None and name in names and rest:
        for one in code.co_consts:
            if isinstance(one, CodeType) and one.co_name == "<lambda>":
                if rest[0] in (*names_of(one), RETURN):
                    return one
    return found


def _helper(place: Place, name: str, rest: tuple[str, ...]) -> tuple[Found, int] | None:
    """A function that another one calls: global, closed over, in a module, or a method."""
    function = place.found.function
    value = function.__globals__.get(name)
    if name in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        try:
            value = cell.cell_contents
        except ValueError:
            value = None
    taken = 0
    while isinstance(value, ModuleType) and taken < len(rest):
        value = getattr(value, rest[taken], None)
        taken += 1
    if value is None and place.found.this is not None:
        found = plain(attribute(place.found.this, name), place.found.this, name)
        return None if found is None else (found, 0)
    found = plain(value, None, name) if callable(value) else None
    return None if found is None else (found, taken)


def _part(owner: Any, name: str) -> Any:
    """A part of an object that is no child: an attribute, a parameter or buffer of a module."""
    own = getattr(owner, "__dict__", {})
    if name in own:
        return own[name]
    held = [own.get(kind) for kind in ("_parameters", "_buffers")]
    return next((one[name] for one in held if isinstance(one, dict) and name in one), None)
