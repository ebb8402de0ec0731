"""Names of values that are caught without one: the expression in the caller's source.

``tap.catch(model.lm_head.weight)`` gets the name ``model.lm_head.weight``. Where the source is not
available (``python -c``, standard input, `exec`, a file edited since it was loaded), the name is
the location of the call: ``value_main_12`` for line 12 of ``main``. If C code made the call, the
argument of that code is the name. Finding a name takes milliseconds, so it is done once per call
site.
"""

from __future__ import annotations

import ast
import operator
import os
import threading
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import cast

_LOADED = time.time()
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})  # frames on Python 3.11
_compared = operator.attrgetter(
    "co_name", "co_qualname", "co_firstlineno", "co_code", "co_names", "co_varnames",
    "co_freevars", "co_cellvars", "co_linetable",
)  # fmt: skip


# `executing` is imported late, and is for one thread at a time. No fork comes between: the child
# would wait for a thread that it does not have.
_one_by_one = threading.RLock()
os.register_at_fork(
    before=_one_by_one.acquire,
    after_in_parent=_one_by_one.release,
    after_in_child=_one_by_one.release,
)


class CallSites:
    """Names by call site, each determined once.

    The same expression in another function gets ``x_1``, ``x_2``, …; within one function it is
    one name with a history. Callers in a hurry look into `known` themselves.
    """

    __slots__ = ("_argument", "_codes", "_meanings", "known")

    def __init__(self, argument: str = "value") -> None:
        #: ``(id(frame.f_code), frame.f_lasti)`` → name
        self.known: dict[tuple[int, int], str] = {}
        self._argument = argument
        self._codes: dict[int, CodeType] = {}  # kept alive, because an id may be reused
        self._meanings: dict[str, tuple[object, ...]] = {}

    def lookup(self, frame: FrameType) -> str:
        """Return the name for the call that `frame` is making; never raises."""
        code = frame.f_code
        site = (id(code), frame.f_lasti)
        name = self.known.get(site)
        if name is None:
            self._codes[id(code)] = code
            with _one_by_one:
                name = self.known[site] = self._unique_name(frame)
        return name

    def _unique_name(self, frame: FrameType) -> str:
        text = _expression(frame, self._argument)
        # Code objects compare by content, so a cell that is run again, or a module that is
        # reloaded, keeps its names. Without a source every call site has a name of its own.
        outer = frame
        while outer.f_code.co_name in _COMPREHENSIONS and outer.f_back is not None:
            outer = outer.f_back
        function = outer.f_code
        meaning = (function.co_filename, function, text or (frame.f_code, frame.f_lasti))
        base = text or f"{self._argument}_{function.co_name.strip('<>')}_{frame.f_lineno}"
        name, number = _shortened(base), 0
        while self._meanings.setdefault(name, meaning) != meaning:
            number += 1
            name = _shortened(base, f"_{number}")
        return name


def _shortened(text: str, suffix: str = "") -> str:
    length = 80 - len(suffix)
    return (text if len(text) <= length else text[: length - 1] + "…") + suffix


def _expression(frame: FrameType, argument: str) -> str | None:
    """Return the first argument of the call in one line, or None if it cannot be determined."""
    try:
        import executing

        found = executing.Source.executing(frame)
        call = cast("ast.AST | None", found.node)  # declared as never None, wrongly
        if not isinstance(call, ast.Call) or _edited(frame.f_code, found.source.text):
            return None
        node = _first_argument(call, argument)
        return None if node is None else _one_line(node, found.source.lines)
    except Exception:  # RecursionError, MemoryError, an unreadable file: no name is worth an error
        return None


def _edited(code: CodeType, text: str) -> bool:
    """Return whether the file has been edited since it was loaded.

    People edit a script while it trains. When two calls have traded places, only the compiled
    code tells.
    """
    try:
        written = os.stat(code.co_filename).st_mtime
    except OSError:  # a notebook cell, or a file in an archive
        return False
    if written < _LOADED:
        return False
    module = compile(text, code.co_filename, "exec", dont_inherit=True)
    return not contains_code(module, code)


def contains_code(module: CodeType, code: CodeType) -> bool:
    """Return whether a compiled file contains a function; if not, the file has been edited."""
    return any(_same(one, code) for one in code_objects(module))


def _same(a: CodeType, b: CodeType) -> bool:
    # not ``==``: it ignores line tables on Python 3.11, and on 3.12 code that a debugger or a
    # coverage tool monitors differs from the same code without it
    return (
        _compared(a) == _compared(b)
        and len(a.co_consts) == len(b.co_consts)
        and all(_equal(x, y) for x, y in zip(a.co_consts, b.co_consts, strict=True))
    )


def _equal(a: object, b: object) -> bool:
    if isinstance(a, CodeType) and isinstance(b, CodeType):
        return _same(a, b)
    if isinstance(a, frozenset):
        return a == b  # its order may differ
    return type(a) is type(b) and repr(a) == repr(b)  # tells -0.0 from 0.0, and 1 from True


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all that are nested in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from code_objects(one)


def _first_argument(call: ast.Call, argument: str) -> ast.expr | None:
    if call.args:
        return None if isinstance(call.args[0], ast.Starred) else call.args[0]
    return next((each.value for each in call.keywords if each.arg == argument), None)


def _one_line(node: ast.expr, lines: list[str]) -> str:
    """Return the text of the expression; one over several lines is normalized."""
    if getattr(node, "lineno", None) is None or node.lineno != node.end_lineno:
        text = ast.unparse(node)
    else:  # columns count bytes
        line = lines[node.lineno - 1].encode()
        text = line[node.col_offset : node.end_col_offset].decode()
    return " ".join(text.split())
