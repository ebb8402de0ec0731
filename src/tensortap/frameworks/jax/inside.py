"""What a function that is not compiled has compiled inside: its scans, loops, branches, jits.

JAX compiles each of these programs on its own, when the function comes by. With marks in it XLA
may round differently, so that each is treated as a jitted function is: compiled with statistics
as outputs, compared with itself without marks when it first runs, and where the two differ, the
one without marks gives the results.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, primitives

from tensortap.frameworks.jax.compiled import DIFFERS, About, Extra, identical, numbers
from tensortap.frameworks.jax.harvest import Entry, Harvest, has_marks, programs_in, run_opened
from tensortap.frameworks.jax.primitive import tangent_p, value_p
from tensortap.pipeline.pipeline import pipeline

_PROGRAMS = 256  # a scan whose body is a new function each time is a new program each time

Receive = Callable[[Entry, Any], None]
Call = Callable[..., Any]


class Inside:
    """Runs the programs inside functions; `say` is told what could not be done."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._programs: collections.OrderedDict[Any, _Program] = collections.OrderedDict()

    @contextlib.contextmanager
    def running(self, receive: Receive) -> Iterator[None]:
        """What this thread runs now gives its statistics to `receive`: an entry and its vector."""
        _patch(1)
        try:
            with _running(functools.partial(self._run, receive)):
                yield
        finally:
            _patch(-1)

    def _run(
        self, receive: Receive, primitive: Any, original: Call, args: Any, params: dict[str, Any]
    ) -> Any:
        key = primitive, tuple(sorted(params.items(), key=lambda item: item[0]))
        program = self._programs.pop(key, None)
        if program is None:
            try:
                program = _Program(primitive, original, params)
            except Exception as error:
                if pipeline.strict:
                    raise
                self._say(
                    f"{primitive.name}: its marks stay in it, {type(error).__name__}: {error}"
                )
                return original(*args, **params)
        self._programs[key] = program  # the latest
        if len(self._programs) > _PROGRAMS:
            self._programs.popitem(last=False)
        # the program that has the marks in it still is one of ours
        with set_xla_metadata(tensortap=None), _running(None):
            return self._seen(receive, program, args)

    def _seen(self, receive: Receive, program: _Program, args: Any) -> Any:
        try:
            results, extra = program.marked(*args)
        except Exception as error:
            if pipeline.strict:
                raise
            plain = program.plain(*args)  # if the error is the user's, here it is again
            self._say(f"{program.name}: {type(error).__name__}: {error}")
            return plain
        for reason in extra.about.unseen:
            self._say(reason)
        if extra.about.calls_back:
            jax.block_until_ready(results)  # the others may be there before
        for entry, vector in zip(extra.about.entries, extra.vector, strict=True):
            receive(entry, vector)
        if program.same:
            return results
        plain = program.plain(*args)
        if program.same is None:
            program.same = identical(plain, results)
            if not program.same:
                self._say(DIFFERS.format(program.name))
        return plain


class _Operation(NamedTuple):
    """As much of an equation as opening it needs."""

    primitive: Any
    params: dict[str, Any]
    outvars: range


class _Program:
    """One program, twice: without marks, and with statistics as outputs."""

    def __init__(self, primitive: Any, original: Call, params: dict[str, Any]) -> None:
        self.name = f"{params.get('name') or primitive.name}()"
        self.same: bool | None = None  # whether both give the same results; None: not known yet
        self.plain = functools.partial(original, **_without_marks(params))
        operation = _Operation(primitive, params, range(len(_outermost(params).out_avals)))

        def marked(*args: Any) -> Any:
            found = Harvest()
            outputs = run_opened(operation, list(args), found)
            about = About(
                tuple(found.entries), tuple(found.unseen), found.calls_back, False, next(numbers)
            )
            return outputs, Extra(tuple(found.vectors), about)

        self.marked: Call = jax.jit(marked)


def _outermost(params: dict[str, Any]) -> Any:
    """The program whose outputs are those of a jit, a scan, a while_loop or a cond."""
    if "branches" in params:
        return params["branches"][0]
    return params["body_jaxpr" if "body_jaxpr" in params else "jaxpr"]


# -- programs without marks --------------------------------------------------------------------


def _without_marks(params: dict[str, Any]) -> dict[str, Any]:
    return {name: _clean(value) for name, value in params.items()}


def _clean(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=_clean(value.jaxpr))
    if isinstance(value, Jaxpr):
        return _clean_program(value)
    if isinstance(value, (tuple, list)) and any(isinstance(v, (ClosedJaxpr, Jaxpr)) for v in value):
        return type(value)(_clean(v) for v in value)
    return value


def _clean_program(program: Jaxpr) -> Jaxpr:
    stands_for: dict[Any, Any] = {}

    def meant(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else stands_for.get(atom, atom)

    equations = []
    for eqn in program.eqns:
        inputs = [meant(atom) for atom in eqn.invars]
        if eqn.primitive in (value_p, tangent_p):
            stands_for[eqn.outvars[0]] = inputs[0]
        else:
            equations.append(
                eqn.replace(
                    invars=inputs, params=_without_marks(eqn.params), ctx=_own_context(eqn.ctx)
                )
            )
    return program.replace(eqns=equations, outvars=[meant(atom) for atom in program.outvars])


def _own_context(context: Any) -> Any:
    """That of an equation, less what kept its trace apart in JAX's caches."""
    with context.manager, set_xla_metadata(tensortap=None):
        return type(context)()  # what holds here and now


# -- where JAX runs them -----------------------------------------------------------------------

_here = threading.local()
_lock = threading.Lock()
_users = 0
_undo: list[Callable[[], None]] = []


@contextlib.contextmanager
def _running(run: Call | None) -> Iterator[None]:
    """What has marks in it is run by `run` in this thread; None: by JAX."""
    before = getattr(_here, "run", None)
    _here.run = run
    try:
        yield
    finally:
        _here.run = before


def _patch(change: int) -> None:
    """Let JAX ask us first, while anybody wants it."""
    global _users
    with _lock:
        _users += change
        if change > 0 and _users == 1:
            for name in ("scan_p", "while_p", "cond_p"):
                primitive = getattr(primitives, name)
                _replace(primitive, "impl", functools.partial(_asked_first, primitive))
            _replace_jit()
        elif _users == 0:
            while _undo:
                _undo.pop()()


def _replace(holder: Any, name: str, around: Callable[[Call], Call]) -> None:
    original = getattr(holder, name)
    setattr(holder, name, around(original))
    _undo.append(lambda: setattr(holder, name, original))


def _asked_first(primitive: Any, original: Call) -> Call:
    def impl(*args: Any, **params: Any) -> Any:
        run = getattr(_here, "run", None)
        if run is None or not _to_be_opened(params):
            return original(*args, **params)
        return run(primitive, original, args, params)

    return impl


def _replace_jit() -> None:
    """A jit that runs at once does not come by its primitive, but by a function of JAX.

    Its results are followed by what a shorter way past Python needs, which such a call must not
    take: None stands for that.
    """
    from jax._src import pjit

    def around(original: Call) -> Call:
        def results_of(*args: Any, **params: Any) -> Any:
            return original(*args, **params)[0]

        def call(*args: Any, **params: Any) -> Any:
            run = getattr(_here, "run", None)
            if run is None or not _to_be_opened(params):
                return original(*args, **params)
            return run(primitives.jit_p, results_of, args, params), None, None, []

        return call

    if hasattr(pjit, "_pjit_call_impl_python"):
        _replace(pjit, "_pjit_call_impl_python", around)


def _to_be_opened(params: dict[str, Any]) -> bool:
    """Whether there are marks in it; what has effects must not happen twice, and calls back."""
    inner = programs_in(params)
    return any(map(has_marks, inner)) and not any(program.effects for program in inner)
