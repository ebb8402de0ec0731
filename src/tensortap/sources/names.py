"""The name of a value that was caught without one: the expression that the caller wrote.

``tap.catch(model.lm_head.weight)`` is called ``model.lm_head.weight``. Where the source cannot
be had (``python -c``, standard input, `exec`, a file edited since it was loaded), or where C code
made the call (``map(tap.catch, values)``), the name says where the call was instead:
``value_main_12`` for line 12 of ``main``. Finding a name takes milliseconds, so it is done once
for each call site.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import threading
import time
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import cast

LONGEST = 80
_LOADED = time.time()
# Code objects of their own before Python 3.12, part of their function since.
_INLINE = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
# executing changes the tree it shares while it looks (Python 3.10), so one thread at a time;
# re-entrant, because a signal handler may catch something too.
_finding = threading.RLock()


def _renew_lock() -> None:
    """A thread that held the lock when its process forked does not exist in the child."""
    global _finding
    _finding = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def name_of_call(frame: FrameType, argument: str = "value") -> str:
    """The first argument of the call that `frame` is making, as written there.

    >>> import sys
    >>> def catch(value):
    ...     return name_of_call(sys._getframe(1))
    >>> catch("a".upper())
    '"a".upper()'
    """
    text = _expression(frame, argument)
    return _cut(_place(frame, argument) if text is None else text)


class CallSites:
    """Names by call site, each found once.

    The same expression in another function gets ``x_1``, ``x_2``, …; twice in one function, or
    in a loop, it is one name with a history. Callers in a hurry look into `known` themselves.

    >>> import sys
    >>> sites = CallSites()
    >>> def catch(value):
    ...     return sites.lookup(sys._getframe(1))
    >>> def other(x):
    ...     return catch(x)
    >>> x = 1
    >>> catch(x), catch(x), other(x)
    ('x', 'x', 'x_1')
    """

    __slots__ = ("_argument", "_codes", "_meanings", "known")

    def __init__(self, argument: str = "value") -> None:
        #: ``(id(frame.f_code), frame.f_lasti)`` → name
        self.known: dict[tuple[int, int], str] = {}
        self._argument = argument
        self._codes: dict[int, CodeType] = {}  # kept alive: an id may be given out again
        self._meanings: dict[str, tuple[object, ...]] = {}

    def lookup(self, frame: FrameType) -> str:
        """The name for the call that `frame` is making; never raises."""
        name = self.known.get((id(frame.f_code), frame.f_lasti))
        return self._find(frame) if name is None else name

    def _find(self, frame: FrameType) -> str:
        code = frame.f_code
        site = (id(code), frame.f_lasti)
        with _finding:
            if site not in self.known:  # else another thread was faster
                self._codes[id(code)] = code
                self.known[site] = self._unused(frame)
            return self.known[site]

    def _unused(self, frame: FrameType) -> str:
        text = _expression(frame, self._argument)
        # Code objects compare by content, so a cell that is run again, or a module that is
        # reloaded, keeps its names. Without a source every call means something of its own.
        function = _function(frame).f_code
        meaning = (function.co_filename, function, text or (frame.f_code, frame.f_lasti))
        base = text or _place(frame, self._argument)
        name, number = _cut(base), 0
        while self._meanings.setdefault(name, meaning) != meaning:
            number += 1
            name = _cut(base, f"_{number}")
        return name


def _place(frame: FrameType, argument: str) -> str:
    """Where the call is, for want of what it says: ``value_main_12``."""
    return f"{argument}_{_function(frame).f_code.co_name.strip('<>')}_{frame.f_lineno}"


def _cut(text: str, suffix: str = "") -> str:
    room = LONGEST - len(suffix)
    return (text if len(text) <= room else text[: room - 1] + "…") + suffix


def _function(frame: FrameType) -> FrameType:
    """The frame of the function that a comprehension stands in."""
    while frame.f_code.co_name in _INLINE and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _expression(frame: FrameType, argument: str) -> str | None:
    """The first argument in one line, or None where there is no telling."""
    try:
        import executing

        with _finding:
            found = executing.Source.executing(frame)
        call = cast("ast.AST | None", found.node)  # its type says that there is always one
        if call is None:
            call = _only_call(found.statements, frame.f_code)
        if not isinstance(call, ast.Call) or _calls_into_c(call.func, frame):
            return None
        if _edited(frame.f_code, found.source.text):
            return None
        node = _first_argument(call, argument)
        return None if node is None else _one_line(node, found.source.lines)
    except Exception:  # a name is never worth an error: RecursionError, MemoryError, a bad file
        return None


def _only_call(statements: Iterable[ast.AST] | None, code: CodeType) -> ast.Call | None:
    """The one call of catch in an assert that pytest has rewritten.

    On Python 3.10 rewritten code cannot be matched with its source. Code of its own inside the
    assert (a lambda) is not rewritten, and is not meant here.
    """
    asserts = [statement for statement in statements or () if isinstance(statement, ast.Assert)]
    if len(asserts) != 1 or code.co_name.startswith("<"):
        return None
    calls = [node for node in ast.walk(asserts[0].test) if isinstance(node, ast.Call)]
    catches = [call for call in calls if ast.unparse(call.func).split(".")[-1] == "catch"]
    return catches[0] if len(catches) == 1 else calls[0] if len(calls) == 1 else None


def _calls_into_c(callee: ast.expr, frame: FrameType) -> bool:
    """Whether the caller called C code, and that called us: ``list(map(tap.catch, values))``."""
    target = _resolve(callee, frame)
    return inspect.isclass(target) or inspect.isbuiltin(target) or _is_c_method(target)


def _is_c_method(target: object) -> bool:
    return inspect.ismethoddescriptor(target) and not isinstance(
        target, (staticmethod, classmethod)
    )


def _resolve(node: ast.expr, frame: FrameType) -> object:
    """What a dotted global name stands for, without running anything; None if it is no such."""
    if isinstance(node, ast.Attribute):
        return inspect.getattr_static(_resolve(node.value, frame), node.attr, None)
    # Not locals: frame.f_locals keeps a reference to every one of them until the frame ends.
    code = frame.f_code
    if not isinstance(node, ast.Name) or node.id in (
        *code.co_varnames,
        *code.co_cellvars,
        *code.co_freevars,
    ):
        return None
    return frame.f_globals.get(node.id, getattr(builtins, node.id, None))


def _edited(code: CodeType, text: str) -> bool:
    """Whether the lines of the file are no longer those that run.

    People edit a script while it trains. Two calls below each other then trade places, and
    nothing but the compiled code tells.
    """
    try:
        written = os.stat(code.co_filename).st_mtime
    except OSError:  # a cell or an archive
        return False
    if written < _LOADED:
        return False
    module = compile(text, code.co_filename, "exec", dont_inherit=True)
    return not any(
        code == other and code.co_linetable == other.co_linetable for other in _codes(module)
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _first_argument(call: ast.Call, argument: str) -> ast.expr | None:
    if call.args:
        first = call.args[0]
        return _item(first.value, 0) if isinstance(first, ast.Starred) else first
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if argument in keywords:
        return keywords[argument]
    return _item(keywords[None], argument) if None in keywords else None


def _item(value: ast.expr, key: int | str) -> ast.expr:
    """``pair[0]`` of ``*pair``, ``options['value']`` of ``**options``."""
    return ast.Subscript(value=value, slice=ast.Constant(key), ctx=ast.Load())


def _one_line(node: ast.expr, lines: list[str]) -> str:
    """What is written in one line as it is written; what is not, as it would be."""
    if getattr(node, "lineno", None) is None or node.lineno != node.end_lineno:
        text = ast.unparse(node)
    else:  # columns count bytes
        line = lines[node.lineno - 1].encode()
        text = line[node.col_offset : node.end_col_offset].decode()
    return " ".join(text.split())
