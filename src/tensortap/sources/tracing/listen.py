"""One function that is traced: its calls, what was bound in them, what never was."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias

from tensortap.pipeline.pipeline import pipeline
from tensortap.sources.tracing.calls import unseen
from tensortap.sources.tracing.counts import Moment, Tally
from tensortap.sources.tracing.kept import copied
from tensortap.sources.tracing.paths import fits, joined, near
from tensortap.sources.tracing.reach import parts, reach
from tensortap.sources.tracing.resolve import Place, Point
from tensortap.sources.tracing.wanted import Wanted

if TYPE_CHECKING:
    from tensortap.sources.trace import Tracer


Told: TypeAlias = "set[str] | None"  # the paths that a binding was kept under already


class Watched:
    """A point, and what has come of it."""

    __slots__ = ("bound", "error", "kept", "key", "name", "parts", "point", "whole")

    def __init__(self, point: Point, prefix: str) -> None:
        self.point = point
        self.key = joined(point.key)
        self.name = prefix + self.key  # of the record
        self.whole = not point.deep
        self.bound = 0
        self.error: Exception | None = None
        self.kept = 0
        self.parts: tuple[str, ...] = ()


class Listening:
    """Hears of the calls of one function, for one tracer."""

    def __init__(self, tracer: Tracer, place: Place, points: list[Point]) -> None:
        self.tracer = tracer
        self.place = place
        self.points = points
        self.leaves = False
        self.called_by: Listening | None = None
        self.counted = False  # it is the forward by whose calls iterations are counted
        self.own = False  # a method of the model that may run outside of its forward
        self.called = 0
        self.number = -1
        self.last_turn = -1  # in which it was called in a forward pass
        self.tally = Tally()
        self.running = threading.local()
        # a plain function has its name before the names in it
        prefix = "" if place.path else f"{place.found.function.__name__}."
        self.watched: dict[tuple[str, ...], dict[str | None, list[Watched]]] = {}
        for point in points:
            names = self.watched.setdefault(point.chain, {})
            names.setdefault(point.name, []).append(Watched(point, prefix))

    def wanted(self, chain: tuple[str, ...] = ()) -> Wanted:
        """What is wanted of the function."""
        names = self.watched.get(chain, {})
        depth = len(chain)
        below = {one[depth] for one in self.watched if len(one) > depth and one[:depth] == chain}
        return Wanted(
            frozenset([name for name in names if name is not None]),
            None in names,
            self.leaves,
            {name: self.wanted((*chain, name)) for name in below},
        )

    def open(self) -> Call | None:
        """The function is called."""
        tracer = self.tracer
        if not tracer.on or not pipeline.enabled:
            return None
        counts = tracer.counts
        if self.counted:
            boundary = counts.begin_root(counts.model.training)
            if boundary is not None:
                tracer.gather_before(boundary)
        moment = counts.last
        if moment is None or self.own or self.called_by is not None:
            moment = self._moment()
            if moment is None or not counts.wants(moment):
                return None
        elif not counts.taking:
            return None
        if counts.in_backward is not None:
            if not counts.in_backward():
                self.last_turn = moment.turn
            elif self.last_turn == moment.turn:
                return None  # a checkpoint computes again what was seen in the forward pass
        self.called += 1
        call = Call(self, moment, ())
        if self.leaves:
            self._stack().append(call)
        return call

    def _moment(self) -> Moment | None:
        if self.called_by is not None:
            callers = self.called_by._stack()
            return callers[-1].moment if callers else None
        tracer = self.tracer
        now = tracer.counts.now(self.own)
        if now is not None:
            return now
        moment, boundary = tracer.counts.begin_own(self.tally)
        if boundary is not None:
            tracer.gather_before(boundary)
        return moment

    def _stack(self) -> list[Call]:
        found: list[Call] | None = getattr(self.running, "calls", None)
        if found is None:
            found = self.running.calls = []
        return found

    def closed(self, call: Call) -> None:
        """A call is over."""
        calls = self._stack()
        if call in calls:
            calls.remove(call)

    def fault(self, error: Exception) -> None:
        """Something went wrong here."""
        self.tracer.fault(self.place.label, error)

    def empty(self) -> list[tuple[Point, str]]:
        """What nothing was kept of, and why."""
        found = []
        for names in self.watched.values():
            for name, watched in names.items():
                found += [(one.point, self._why(name, one)) for one in watched if not one.kept]
        return found

    def _why(self, name: str | None, one: Watched) -> str:
        where = self.place.label
        if not self.called and self.number in unseen:
            why = f"{where} is not seen: {unseen[self.number]}"
        elif not self.called:
            why = f"{where} was never called while it was traced (in this process)"
            if self.called_by is not None:
                why = f"{where} was never called by {self.called_by.place.label}"
        elif not one.bound:
            bound = "returned" if name is None else f"bound {name!r}"
            why = f"{where} was called {self.called} times and never {bound}"
        elif one.point.deep and not one.parts:
            why = f"the value of {one.key} has no parts"
        elif one.point.deep:
            why = f"no {one.point.deep[0]!r} in {one.key}; {near(one.point.deep[0], one.parts)}"
        elif one.error is not None:
            why = f"{type(one.error).__name__}: {one.error}"
        else:
            why = "a callback dropped it each time"
        return why


class Call:
    """One call of a function, or of one that is defined inside it."""

    __slots__ = ("chain", "last", "listening", "moment", "names", "orders")

    def __init__(self, listening: Listening, moment: Moment, chain: tuple[str, ...]) -> None:
        self.listening = listening
        self.moment = moment
        self.chain = chain
        self.names = listening.watched.get(chain, {})
        self.orders: dict[str, int] = {}
        self.last: dict[str, tuple[Watched, str, Any, int]] = {}

    def see(self, name: str, value: Any, via: str | None) -> None:
        """A name was bound, or the part `via` of its value was set."""
        watched = self.names.get(name, ())
        told: Told = set() if len(watched) > 1 else None
        for one in watched:
            if one.whole and via is None:
                one.bound += 1
                self._keep(one, one.key, one.name, value, told)
            else:
                self._take(one, value, via, told)

    def give(self, value: Any) -> None:
        """A value is returned."""
        watched = self.names.get(None, ())
        told: Told = set() if len(watched) > 1 else None
        for one in watched:
            self._take(one, value, None, told)

    def _take(self, one: Watched, value: Any, via: str | None, told: Told) -> None:
        deep = one.point.deep
        if via is not None and (not deep or not (via == "*" or fits(deep[0], via))):
            return  # another part of it was set
        one.bound += 1
        if not deep:
            self._keep(one, one.key, one.name, value, told)
            return
        found = False
        for way, part in reach(value, deep):
            found = True
            rest = "." + joined(way) if way else ""
            self._keep(one, one.key + rest, one.name + rest, part, told)
        if not found and not one.kept:
            one.parts = tuple([name for name, _ in parts(value)]) or one.parts

    def _keep(self, one: Watched, path: str, name: str, value: Any, told: Told) -> None:
        if told is not None:
            if path in told:  # two patterns stand for it: it is one binding
                one.kept += 1
                return
            told.add(path)
        order = self.orders.get(path, 0)
        self.orders[path] = order + 1
        tracer = self.listening.tracer
        try:
            if tracer.settings.rebind == "last":
                # as it is now: it may be changed in place before the call is over
                self.last[path] = (one, name, copied(value), order)
            elif tracer.keep(path, name, value, self.moment, order):
                one.kept += 1
        except Exception as error:
            one.error = error
            tracer.fault(path, error)

    def leave(self) -> None:
        """The call is over: what was bound last is kept."""
        self.listening.closed(self)
        tracer = self.listening.tracer
        for path, (one, name, value, order) in self.last.items():
            if tracer.keep(path, name, value, self.moment, order):
                one.kept += 1

    def inner(self, name: str) -> Call | None:
        """A function that is defined inside is called."""
        return Call(self.listening, self.moment, (*self.chain, name))
