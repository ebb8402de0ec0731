"""Instrumented functions: who listens to which, and what their probes call.

A function gets other code while somebody listens to it, and its own back when nobody does. The
probes are three global names in the user's module; they stay there, since a generator that is
suspended, or another thread, may come back to instrumented code at any time. A call that nobody
wants is told so when it is entered and asks nothing more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from types import CodeType, FunctionType
from typing import Any, Protocol

from tensortap.sources.locals import rewrite
from tensortap.sources.locals.rewrite import NoSource
from tensortap.sources.locals.wanted import Wanted, union


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

    def put(self, site: Site, wanted: Wanted) -> None:
        """Instrument the function; NoSource if this way cannot."""

    def remove(self, site: Site) -> None:
        """Let the function be as it was."""


class Site:
    """One function, and who listens to it."""

    def __init__(self, function: FunctionType, number: int) -> None:
        self.function = function
        self.number = number
        self.original: CodeType = function.__code__
        self.way: Way | None = None
        self.everybody: list[tuple[Any, Listener, Wanted]] = []
        self.by_this: dict[int, tuple[Listener, ...]] = {}
        self.anyone: tuple[Listener, ...] = ()

    def sort(self) -> None:
        """Make what `enter` looks into anew."""
        anyone = tuple([one for this, one, _ in self.everybody if this is None])
        by_this: dict[int, tuple[Listener, ...]] = {}
        for this, _, _ in self.everybody:
            if this is not None:
                mine = [one for other, one, _ in self.everybody if other is this]
                by_this[id(this)] = (*mine, *anyone)
        self.anyone = anyone
        # the same dict: the code of the function looks into it
        self.by_this.update(by_this)
        for key in [key for key in self.by_this if key not in by_this]:
            del self.by_this[key]

    @property
    def for_anyone(self) -> bool:
        """Whether somebody wants its calls whatever object they are on."""
        return any(this is None for this, _, _ in self.everybody)


unseen: dict[int, str] = {}  # number of a function → why its calls are not seen

_sites: list[Site] = []
_by_function: dict[int, Site] = {}
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
        site = _by_function.get(id(function))
        if site is None:
            site = Site(function, len(_sites))
            _sites.append(site)
            _by_function[id(function)] = site
        if not site.everybody:
            site.original = function.__code__
        before = list(site.everybody)
        site.everybody.append((this, listener, wanted))
        try:
            _instrument(site)
        except BaseException:
            site.everybody = before
            raise
        site.sort()
        return site.number


def unlisten(function: FunctionType, listener: Listener) -> None:
    """Tell it no more; when nobody listens any more the function has its own code again."""
    with _lock:
        site = _by_function.get(id(function))
        if site is None:
            return
        site.everybody = [one for one in site.everybody if one[1] is not listener]
        site.sort()
        _instrument(site)


def _instrument(site: Site) -> None:
    wanted = union([one for _, _, one in site.everybody])
    if not site.everybody:
        if site.way is not None:
            site.way.remove(site)
            site.way = None
        return
    if site.way is not None:
        site.way.put(site, wanted)
        return
    reasons = []
    for way in ways():
        try:
            way.put(site, wanted)
        except NoSource as error:
            reasons.append(str(error))
            continue
        site.way = way
        return
    raise NoSource("; ".join(reasons))


class FromSource:
    """Code that is compiled anew from the source."""

    def put(self, site: Site, wanted: Wanted) -> None:
        """Give the function code with probes in it."""
        function = site.function
        current, function.__code__ = function.__code__, site.original
        try:
            code = rewrite.rewritten(function, wanted, site.number, site.for_anyone)
        finally:
            function.__code__ = current
        give_probes(site)
        function.__code__ = code

    def remove(self, site: Site) -> None:
        """Give the function its own code back."""
        site.function.__code__ = site.original


def ways() -> list[Way]:
    """The ways to instrument a function, the best first."""
    from tensortap.sources.locals.instructions import FromInstructions
    from tensortap.sources.locals.monitor import Monitored

    return [FromSource(), Monitored(), FromInstructions()]


# -- what probes call --------------------------------------------------------------------


def enter(number: int, this: object) -> Opened | None:
    """A function is entered; None when nobody wants this call."""
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
    names = site.function.__globals__
    names.update(PROBES)
    names[rewrite.IDS.format(site.number)] = site.by_this


def instrumented() -> list[Hashable]:
    """The functions that have probes in them now."""
    return [site.function for site in _sites if site.everybody]
