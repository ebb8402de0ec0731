"""`trace`: any local variable of any method or function, gathered over ranks if asked."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tensortap import ranks
from tensortap.pipeline.pipeline import pipeline
from tensortap.sources.tracing import calls
from tensortap.sources.tracing.counts import Counts, Moment
from tensortap.sources.tracing.gather import Gatherer
from tensortap.sources.tracing.kept import (
    Part,
    Results,
    Turns,
    copied,
    fingerprint,
    marked_copy,
    whole,
)
from tensortap.sources.tracing.listen import Listening
from tensortap.sources.tracing.paths import joined, parse
from tensortap.sources.tracing.records import put
from tensortap.sources.tracing.resolve import Place, Point, Resolver, items
from tensortap.sources.tracing.rewrite import NoSource, forget_files

log = logging.getLogger("tensortap")

Callback = Callable[..., Any]


class TraceOptions(NamedTuple):
    """The arguments of `trace`."""

    every: int
    gathering_interval: int | None
    rebind: str
    changed: bool
    mode: str
    pre_save: tuple[Callback, ...]
    pre_gather: tuple[Callback, ...]
    post_gather: tuple[Callback, ...]
    post_trace: tuple[Callback, ...]
    group: Any
    results: bool


class Tracer:
    """Local variables that are being traced; made by `trace`, for use in a ``with``."""

    def __init__(self, target: Any, paths: Sequence[str], settings: TraceOptions) -> None:
        self.settings = settings
        self.target = target
        self.paths = tuple(paths)
        self._patterns = {path: parse(path) for path in self.paths}
        self._done = Results()  # of earlier times that it was entered
        self._now = Results()
        self._filling: dict[str, Turns] = {}  # kept and not gathered yet
        self._listening: list[Listening] = []
        self._root: Any = None
        self._replicas: Any = None
        self._resolver: Resolver | None = None
        self._marks: dict[str, Hashable] = {}  # path → what tells whether its value has changed
        self._gathered: set[str] = set()  # paths that a rank has brought something of
        self._meant: dict[Point, str] = {}  # which of the paths each point is from
        self._unmatched: set[str] = set()
        self._lock = threading.RLock()
        self._forked = False
        self._holding = settings.results  # not in a worker: what is kept there would be lost
        self._rank: int | None = None
        self._errors: list[Exception] = []
        self._gatherer: Gatherer | None = None
        self.counts = Counts(settings.every, settings.mode, settings.gathering_interval)
        self.on = False

    # -- begin and end -------------------------------------------------------------------

    def __enter__(self) -> Tracer:
        if self.on:
            raise RuntimeError("this tracer is entered already: leave it first, or make another")
        self._forked, self._rank = False, None
        self._holding = self.settings.results
        target, resolver = _resolver(self.target)
        points = self._points(resolver)
        self.on = True
        _active.add(self)
        try:
            if self.settings.gathering_interval is not None:
                self._gatherer = Gatherer(self.settings.group, self._report)
                self._gatherer.connect()
            self._listen(points)
            self._watch_root(target)
        except BaseException:
            self._stop()
            self._hang_up()
            raise
        return self

    def _points(self, resolver: Resolver) -> dict[Place, list[Point]]:
        found: dict[Place, list[Point]] = {}
        known: set[tuple[Place, tuple[str, ...], tuple[str, ...]]] = set()
        self._meant = {}
        for path, segments in self._patterns.items():
            points, why = resolver.resolve(segments)
            if not points:
                self.say(path, f"nothing is traced as {path!r}: {why}")
            for point in points:
                same = (point.place, point.key, point.deep)
                if same in known:
                    continue  # an earlier path stands for it too
                known.add(same)
                self._meant[point] = path
                found.setdefault(point.place, []).append(point)
                if not point.deep:
                    self._now.setdefault(joined(point.key), Part())
        for place in list(found):  # a helper is only looked at while its caller runs
            caller = place.caller
            while caller is not None:
                found.setdefault(caller, [])
                caller = caller.caller
        return found

    def _listen(self, points: Mapping[Place, list[Point]]) -> None:
        listening = {place: Listening(self, place, mine) for place, mine in points.items()}
        callers = {place.caller for place in points if place.caller is not None}
        for place, one in listening.items():
            one.called_by = listening[place.caller] if place.caller is not None else None
            one.leaves = self.settings.rebind == "last" or place in callers
            try:
                one.number = calls.listen(place.found.function, place.found.this, one, one.wanted())
                calls.unseen.pop(one.number, None)
            except NoSource as error:
                for point in one.points:
                    name = joined(point.key)
                    self.say(name, f"cannot trace {name!r} in {place.label}: {error}")
                continue
            self._listening.append(one)
        forget_files()

    def _watch_root(self, target: Any) -> None:
        torch: Any = sys.modules.get("torch")
        if hasattr(torch, "nn") and isinstance(target, torch.nn.Module):
            from tensortap.frameworks.torch.trace_models import (
                Replicas,
                Root,
                closed,
                has_replicas,
                in_backward,
            )

            if closed(target) is not None:
                return  # it takes no hooks
            for one in self._listening:
                mine = one.place.found.this is target
                one.own = mine and one.place.path not in ((), ("forward",))
            if has_replicas():
                wanted = {id(one.place.found.this): one.place.found.this for one in self._listening}
                modules = [one for one in wanted.values() if isinstance(one, torch.nn.Module)]
                self._replicas = Replicas(modules)
            self.counts.model = target
            self.counts.in_backward = in_backward
            own = any(one.own for one in self._listening)
            forward = [one for one in self._listening if one.place.path == ("forward",)]
            if forward and not own:
                forward[0].counted = True  # it is told of every call anyway
            else:
                end = self.counts.end_of_root if own else None
                self._root = Root(target, self.root_begins, end, self._root_unseen)

    def __exit__(self, *error: object) -> None:
        # whatever was raised goes through: nothing here may take its place
        raised = bool(error) and error[0] is not None
        self._stop()
        try:
            self._finish(raised)
        except Exception:
            if not raised:
                raise
            log.exception("tensortap: while tracing ended")

    def _stop(self) -> None:
        self.on = False
        _active.discard(self)
        for one in self._listening:
            calls.unlisten(one.place.found.function, one)
        if self._root is not None:
            self._root.remove()
            self._root = None
        if self._replicas is not None:
            self._replicas.remove()
            self._replicas = None

    def _finish(self, raised: bool) -> None:
        settings = self.settings
        # the others may be elsewhere: after an error nobody is waited for
        self._gather(None, together=not raised)
        self._hang_up()
        self._call_all(settings.post_trace, self._now)
        for callback in {id(one): one for one in self._callbacks()}.values():
            close = getattr(callback, "close", None)
            if callable(close):
                try:
                    close()
                except Exception as error:
                    self._report(f"{_name(callback)}.close()", error)
        self._say_empty()
        self._listening = []
        for path, part in self._now.items():
            self._done.setdefault(path, Part()).extend(part)
        self._now = Results()
        self._raise()

    def _callbacks(self) -> Iterable[Callback]:
        settings = self.settings
        return (
            *settings.pre_save, *settings.pre_gather, *settings.post_gather, *settings.post_trace
        )  # fmt: skip

    @property
    def results(self) -> Results:
        """Path → `values`, `iterations`, `ranks` and `orders`, aligned.

        While it is entered: what has been gathered, or without an interval all that was kept.
        """
        if not self.on and not self._now:
            return self._done
        sources: list[Mapping[str, Part]] = [self._done, self._now]
        if self.settings.gathering_interval is None:
            with self._lock:
                sources.append({path: part.whole() for path, part in self._filling.items()})
        merged = Results()
        for source in sources:
            for path, part in list(source.items()):
                merged.setdefault(path, Part()).extend(part)
        return merged

    # -- keeping -------------------------------------------------------------------------

    def keep(self, path: str, name: str, value: Any, moment: Moment, order: int) -> bool:
        """Keep a copy of a value, unless it is what was kept last; whether it was kept."""
        settings = self.settings
        with self._lock:
            both = None if settings.pre_save else marked_copy(value)
            mark: Hashable = None
            if both is not None:
                mark, value = both
            elif settings.changed:
                mark = fingerprint(value)
            if settings.changed and mark is not None and self._marks.get(path) == mark:
                return True
            if both is None:
                value = copied(value)
            if settings.pre_save:
                value = self._before_saving(path, value)
                if value is None:
                    return False
            if settings.changed:
                self._marks[path] = mark
            if pipeline.on:
                try:
                    put(name, whole(value), moment, order)
                except Exception as error:  # the results have it all the same
                    pipeline.fault(path, error, "was not handed on")
            if self._holding:
                if self._rank is None:
                    self._rank = ranks.rank_and_world_size()[0]
                part = self._filling.get(path)
                if part is None:
                    part = self._filling[path] = Turns()
                part.values.append(value)
                part.iterations.append(moment.iteration)
                part.ranks.append(self._rank)
                part.orders.append(order)
                part.turns.append(moment.turn)
            return True

    def _before_saving(self, path: str, value: Any) -> Any:
        for callback in self.settings.pre_save:
            try:
                value = callback(path, value)
            except Exception as error:
                self._report(f"{_name(callback)}({path})", error)
                self._raise()
                continue
            if value is None:
                return None
        return value

    def fault(self, name: str, error: Exception) -> None:
        """Something went wrong under a path."""
        pipeline.fault(name, error, "was not traced")

    def say(self, path: str, text: str) -> None:
        """Tell the user something about a path, once."""
        if path not in self._unmatched:
            self._unmatched.add(path)
            log.warning("tensortap: %s", text)

    def _say_empty(self) -> None:
        """Say of what nothing was kept, and why: once for all that a pattern stands for."""
        groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for one in self._listening:
            for point, why in one.empty():
                key, path = joined(point.key), joined((*point.key, *point.deep))
                if any(one == key or one.startswith(f"{key}.") for one in self._gathered):
                    continue  # another rank has kept it
                pattern = self._meant[point]
                alike = why.replace(one.place.label, "")
                groups.setdefault((pattern, alike), []).append((path, why))
        for (pattern, _), ((path, why), *others) in groups.items():
            also = ""
            if others:
                also = f" (and so it is with {len(others)} more that {pattern!r} stands for)"
            self.say(path, f"nothing was kept of {path!r}: {why}{also}")

    # -- the calls of the target ---------------------------------------------------------

    def root_begins(self, model: Any, args: Any = None) -> None:
        """The model is called."""
        if self.on and pipeline.enabled:
            boundary = self.counts.begin_root(model.training)
            if boundary is not None:
                self.gather_before(boundary)

    def gather_before(self, boundary: int) -> None:
        """Gather what was kept before that turn."""
        if not self._forked:
            self._gather(boundary)
            self._raise()

    def _root_unseen(self, name: str) -> None:
        self.say(
            f"{name}()",
            f"calls of {name} are not counted: it is compiled with fullgraph=True; each function "
            "counts its own",
        )

    # -- gathering -----------------------------------------------------------------------

    def _gather(self, boundary: int | None, together: bool = True) -> None:
        with self._lock:
            parts = {path: part.before(boundary) for path, part in self._filling.items()}
            self._rank = None
            self._call_all(self.settings.pre_gather, parts)
            found: Mapping[str, Part] | None = parts
            if together and self._gatherer is not None:
                try:
                    found = self._gatherer.gather(parts, last=boundary is None)
                except Exception as error:
                    self._report("gathering", error)
            if found is not None:
                self._gathered |= {path for path, part in found.items() if part.values}
                self._call_all(self.settings.post_gather, found)
                for path, part in found.items():
                    self._now.setdefault(path, Part()).extend(part)

    def _hang_up(self) -> None:
        """Whoever waits for this rank is told so."""
        if self._gatherer is not None:
            self._gatherer.close()
            self._gatherer = None

    def _call_all(self, callbacks: Iterable[Callback], parts: Mapping[str, Part]) -> None:
        for callback in callbacks:
            for path, part in parts.items():
                if not part.values:
                    continue
                before = list(part.values), list(part.iterations)
                try:
                    callback(path, part.values, part.iterations, part.ranks)
                    part.follow(*before)
                except Exception as error:
                    self._report(f"{_name(callback)}({path})", error)

    def _report(self, name: str, error: Exception) -> None:
        """Count and log an error; where errors are to be raised it waits for the others."""
        if pipeline.strict:
            self._errors.append(error)
        else:
            pipeline.fault(name, error, "failed")

    def _raise(self) -> None:
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        self._forked, self._holding = True, False


_active: weakref.WeakSet[Tracer] = weakref.WeakSet()


def _renew_locks() -> None:
    for tracer in list(_active):
        tracer._after_fork()


os.register_at_fork(after_in_child=_renew_locks)


def _name(callback: Callback) -> str:
    return getattr(callback, "__name__", None) or type(callback).__name__


def _resolver(target: Any) -> tuple[Any, Resolver]:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "nn"):
        return target, Resolver(target, items)
    from tensortap.frameworks.torch import trace_models as torch_models

    torch_models.use()
    if not isinstance(target, torch.nn.Module):
        return target, Resolver(target, items, closed=torch_models.closed)
    target = torch_models.inside(target)
    return target, Resolver(target, torch_models.children, torch_models.common, torch_models.closed)


def trace(
    target: Any,
    paths: str | Sequence[str],
    *,
    every: int = 1,
    gathering_interval: int | None = None,
    rebind: str = "all",
    changed: bool = True,
    mode: str = "both",
    pre_save_callbacks: Iterable[Callback] = (),
    pre_gather_callbacks: Iterable[Callback] = (),
    post_gather_callbacks: Iterable[Callback] = (),
    post_trace_callbacks: Iterable[Callback] = (),
    group: Any = None,
    results: bool = True,
) -> Tracer:
    """Trace local variables: ``with tap.trace(model, ["blocks.*.forward.scores"]) as tracer: …``.

    `target` is a model, any object, or a function. A path is modules, then a function, then a
    name in it, then attributes, keys and indices of its value; a function or module alone is
    what it returns. ``*`` stands for one segment, ``**`` for any number.

    `every` takes each n-th iteration (call of the model), `rebind` "all" bindings of a name
    within a call or only the "last", `changed` passes over what equals the value kept last, `mode`
    is "train", "eval" or "both". Every `gathering_interval` iterations what was kept is gathered
    to rank 0 of `group`. `results=False` keeps nothing in memory: for an open run or a live
    session. Callbacks: before a value is kept ``f(name, value)``, whose result is kept unless it
    is None; before gathering, after it and at the end ``f(name, values, iterations, ranks)``,
    which change the lists.

    >>> def mean(xs):
    ...     total = sum(xs)
    ...     return total / len(xs)
    >>> with trace(mean, ["total", "return"]) as tracer:
    ...     _ = mean([1.0, 2.0])
    >>> tracer.results["total"].values, tracer.results["return"].values
    ([3.0], [1.5])
    """
    numbers: dict[str, Any] = {"every": every, "gathering_interval": gathering_interval}
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r}: a number of iterations, at least 1")
    if rebind not in ("all", "last"):
        raise ValueError(f"rebind={rebind!r}: it is 'all' or 'last'")
    if mode not in ("both", "train", "eval"):
        raise ValueError(f"mode={mode!r}: it is 'train', 'eval' or 'both'")
    settings = TraceOptions(
        every, gathering_interval, rebind, changed, mode,
        _functions("pre_save_callbacks", pre_save_callbacks),
        _functions("pre_gather_callbacks", pre_gather_callbacks),
        _functions("post_gather_callbacks", post_gather_callbacks),
        _functions("post_trace_callbacks", post_trace_callbacks),
        group, results,
    )  # fmt: skip
    wanted = [paths] if isinstance(paths, str) else list(paths)
    if not wanted:
        raise ValueError("no paths: say what to trace, as 'forward.x' or 'blocks.*.forward.x'")
    return Tracer(target, wanted, settings)


def _functions(argument: str, given: Iterable[Callback]) -> tuple[Callback, ...]:
    """The callbacks of one moment; one alone may be given without a list."""
    found = (given,) if callable(given) else tuple(given)
    for one in found:
        if not callable(one):
            raise TypeError(f"{argument}: functions to call, not {one!r:.80}")
    return found
