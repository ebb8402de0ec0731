"""Instrumented functions: who listens to which, and what their probes call.

A function gets other code while somebody listens to it, and its own back when nobody does. The
probes are three global names in the user's module; they stay there, since a generator that is
suspended, or another thread, may come back to instrumented code at any time. A call that nobody
wants is told so when it is entered and asks nothing more.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from types import CodeType, FunctionType
from typing import Any, Protocol

from tensortap.sources.tracing import rewrite
from tensortap.sources.tracing.rewrite import NoSource
from tensortap.sources.tracing.wanted import Wanted, union


class Call(Protocol):
    """One call of a function, for one listener."""

    def see(self, name: str, value: Any, via: str | None) -> None:
        """A name was bound, or the part `via` of what it names was set."""

    def give(self, value: Any) -> None:
        """A value is returned, or yielded."""

    def leave(self) -> None:
        """The call is over."""

    def inner(self, name: str) -> Call | None:
        """A function that is defined inside is called."""


class Listener(Protocol):
    """Somebody who wants to know of the calls of a function."""

    def open(self) -> Call | None:
        """A call begins; None if it is not of interest."""

    def fault(self, error: Exception) -> None:
        """Something of the above has raised."""


Opened = list[tuple[Listener, Call]]


class Way(Protocol):
    """A way to instrument a function: `put` it there, or `remove` it."""

    def put(self, site: Site, wanted: Wanted, anyone: bool) -> None:
        """Instrument the function; NoSource if this way cannot."""

    def remove(self, site: Site) -> None:
        """Let the function be as it was."""


class ByThis(dict[int, tuple[Listener, ...]]):
    """Who listens to calls on which object, by its id.

    It is a global name of the function, which some programs send to other processes by value with
    all such names: there nobody listens.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[ByThis], tuple[()]]:
        return ByThis, ()


class Site:
    """One function, and who listens to it.

    It does not keep the function: closures come and go, and may be traced each.
    """

    def __init__(self, function: FunctionType, number: int) -> None:
        self._function = weakref.ref(function)
        self.number = number
        self.original: CodeType = function.__code__
        self.given: CodeType | None = None
        self.way: Way | None = None
        self.wanted = Wanted()  # what its code tells of
        self.for_anyone = False  # whatever object it is called on
        self.listeners: dict[Listener, tuple[Any, Wanted]] = {}
        self.by_this = ByThis()
        self.anyone: tuple[Listener, ...] = ()

    def function(self) -> FunctionType:
        """The function; whoever listens to it has it."""
        found = self._function()
        assert found is not None
        return found

    def give(self, code: CodeType) -> None:
        """Let the function run other code."""
        self.function().__code__ = self.given = code

    def give_back(self) -> None:
        """Let it run its own again, unless somebody else has given it another meanwhile."""
        function = self._function()
        if function is not None and function.__code__ is self.given:
            function.__code__ = self.original

    def add(self, listener: Listener, this: Any, wanted: Wanted) -> None:
        """One more listener."""
        self.listeners[listener] = (this, wanted)
        if this is None:
            self.anyone = (*self.anyone, listener)
            for key, group in list(self.by_this.items()):
                self.by_this[key] = (*group, listener)
        else:
            self.by_this[id(this)] = (*self.by_this.get(id(this), self.anyone), listener)

    def drop(self, listener: Listener) -> None:
        """One listener less."""
        this, _ = self.listeners.pop(listener)
        self.anyone = tuple([one for one in self.anyone if one is not listener])
        for key in [id(this)] if this is not None else list(self.by_this):
            left = tuple([one for one in self.by_this.get(key, ()) if one is not listener])
            if left == self.anyone:
                # the same dict always: the code of the function looks into it
                self.by_this.pop(key, None)
            else:
                self.by_this[key] = left


unseen: dict[int, str] = {}  # number of a function → why its calls are not seen

_sites: list[Site] = []
_by_function: weakref.WeakKeyDictionary[FunctionType, Site] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def listen(function: FunctionType, this: Any, listener: Listener, wanted: Wanted) -> int:
    """Tell a listener of every call of the function on the object `this` (None: of all calls).

    Returns the number of the function.
    """
    with _lock:
        site = _by_function.get(function)
        if site is None:
            site = _by_function[function] = Site(function, len(_sites))
            _sites.append(site)
        _instrument(site, wanted, this is None)
        site.add(listener, this, wanted)
        return site.number


def unlisten(function: FunctionType, listener: Listener) -> None:
    """Tell it no more; when nobody listens any more the function has its own code again."""
    with _lock:
        site = _by_function.get(function)
        if site is None or listener not in site.listeners:
            return
        site.drop(listener)
        # as long as others listen the code stays: compiling it anew would cost more than it saves
        if not site.listeners and site.way is not None:
            site.way.remove(site)
            site.way = None


def stands_for(other: Any, this: Any) -> None:
    """Calls on another object are calls on `this`, until it `stands_for_itself`."""
    for site in _sites:
        listeners = site.by_this.get(id(this))
        if listeners is not None:
            site.by_this[id(other)] = listeners


def stands_for_itself(other: Any) -> None:
    """Calls on it are its own again."""
    for site in _sites:
        site.by_this.pop(id(other), None)


def _instrument(site: Site, wanted: Wanted, for_anyone: bool) -> None:
    """Have the code tell of this too."""
    possible = ways() if site.way is None else [site.way]
    if site.way is None:
        site.original, site.wanted, site.for_anyone = site.function().__code__, Wanted(), False
    more = union([site.wanted, wanted])
    anyone = site.for_anyone or for_anyone
    if site.way is not None and (more, anyone) == (site.wanted, site.for_anyone):
        return
    reasons = []
    for way in possible:
        try:
            way.put(site, more, anyone)
        except NoSource as error:
            reasons.append(str(error))
            continue
        site.way, site.wanted, site.for_anyone = way, more, anyone
        return
    raise NoSource("; ".join(reasons))


class FromSource:
    """Code that is compiled anew from the source."""

    def put(self, site: Site, wanted: Wanted, anyone: bool) -> None:
        """Give the function code with probes in it."""
        names = site.function().__globals__
        code = rewrite.rewritten(site.original, names, wanted, site.number, anyone)
        give_probes(site)
        site.give(code)

    def remove(self, site: Site) -> None:
        """Give the function its own code back."""
        site.give_back()


def ways() -> list[Way]:
    """The ways to instrument a function, the best first."""
    from tensortap.sources.tracing.monitor import Monitored

    return [FromSource(), Monitored()]


# -- what probes call --------------------------------------------------------------------


def enter(number: int, this: object) -> Opened | None:
    """A function is entered; None when nobody wants this call."""
    if number >= len(_sites):
        return None  # instrumented in another process, and sent here
    site = _sites[number]
    listeners = site.by_this.get(id(this), site.anyone)
    if not listeners:
        return None
    opened: Opened = []
    for one in listeners:
        try:
            call = one.open()
        except Exception as error:
            one.fault(error)
            continue
        if call is not None:
            opened.append((one, call))
    return opened or None


def inner(outer: Opened | None, name: str) -> Opened | None:
    """A function that is defined inside one is entered."""
    opened: Opened = []
    for one, call in outer or ():
        try:
            found = call.inner(name)
        except Exception as error:
            one.fault(error)
            continue
        if found is not None:
            opened.append((one, found))
    return opened or None


def see(opened: Opened | None, name: str, value: Any, via: str | None = None) -> Any:
    """A name was bound."""
    for one, call in opened or ():
        try:
            call.see(name, value, via)
        except Exception as error:
            one.fault(error)
    return value


def give(opened: Opened | None, value: Any) -> Any:
    """A value is returned."""
    for one, call in opened or ():
        try:
            call.give(value)
        except Exception as error:
            one.fault(error)
    return value


def leave(opened: Opened | None) -> None:
    """A call is over."""
    for one, call in opened or ():
        try:
            call.leave()
        except Exception as error:
            one.fault(error)


def without_ours(names: Any) -> Any:
    """What ``locals()``, ``vars()`` or ``dir()`` has found, as if no probe were there."""
    ours = [name for name in names if name.startswith("__tensortap_")]
    for name in ours:
        if isinstance(names, dict):
            del names[name]
        else:
            names.remove(name)
    return names


PROBES: dict[str, Callable[..., Any]] = {
    rewrite.ENTER: enter,
    rewrite.INNER: inner,
    rewrite.SEE: see,
    rewrite.PASS: see,
    rewrite.GIVE: give,
    rewrite.LEAVE: leave,
    rewrite.LOCALS: without_ours,
    rewrite.ID: id,
}
ALL: tuple[Any, ...] = (enter, inner, see, give, leave, without_ours)
for _probe in ALL:
    _probe._torchdynamo_disable = True  # no part of a graph


def give_probes(site: Site) -> None:
    """Put the probes among the global names of the module of a function."""
    names = site.function().__globals__
    names.update(PROBES)
    names[rewrite.IDS.format(site.number)] = site.by_this


def instrumented() -> list[Hashable]:
    """The functions that have probes in them now."""
    return [site.function() for site in _sites if site.listeners]
