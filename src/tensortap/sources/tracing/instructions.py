"""Functions whose source is not at hand, on Python 3.10 and 3.11: probes among instructions.

The library `bytecode` takes the code apart and puts it together again.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import TYPE_CHECKING, Any

from tensortap.sources.tracing import rewrite
from tensortap.sources.tracing.functions import arguments_of, mangled
from tensortap.sources.tracing.rewrite import NoSource
from tensortap.sources.tracing.wanted import Wanted

if TYPE_CHECKING:
    from tensortap.sources.tracing.calls import Site

_CALL = rewrite.CALL.format(0)
_VALUE = "__tensortap_value__"
_STORES = {"STORE_FAST": "LOAD_FAST", "STORE_DEREF": "LOAD_DEREF", "STORE_GLOBAL": "LOAD_GLOBAL"}
_GENERATOR = 0x20 | 0x200


class FromInstructions:
    """Code with probes put between the instructions."""

    def put(self, site: Site, wanted: Wanted, anyone: bool) -> None:
        """Give the function code with probes in it."""
        if sys.version_info >= (3, 12):
            raise NoSource("on this Python there is sys.monitoring instead")
        if not (wanted.names or wanted.returns or wanted.leaves):
            raise NoSource("functions inside a function are seen only where there is source")
        from tensortap.sources.tracing.calls import give_probes

        code = with_probes(site.original, wanted, site.number)
        give_probes(site)
        site.give(code)

    def remove(self, site: Site) -> None:
        """Give the function its own code back."""
        site.give_back()


def with_probes(code: CodeType, wanted: Wanted, number: int) -> CodeType:
    """The code with a probe after each binding of a wanted name."""
    try:
        import bytecode
    except ImportError:
        raise NoSource(
            "without the source its locals cannot be seen on this Python: "
            "pip install 'tensortap[trace]'"
        ) from None
    except Exception as error:  # a version of it for another Python
        raise NoSource(f"the installed bytecode does not know this Python: {error!r}") from None
    whole = bytecode.Bytecode.from_code(code)
    instructions = list(whole)
    begin = _beginning(instructions)
    write = _Writer(bytecode, code, wanted)
    new: list[Any] = [*instructions[: begin + 1], *write.start(number, instructions[begin])]
    for one in instructions[begin + 1 :]:
        name = getattr(one, "name", "")
        if name == "RETURN_VALUE":
            new += write.end(one)
        elif name == "YIELD_VALUE" and code.co_flags & _GENERATOR:
            new += write.given(one)
        new.append(one)
        if name in _STORES:
            new += write.seen(one)
    whole[:] = new
    try:
        made: CodeType = whole.to_code()
    except (ValueError, RuntimeError, TypeError) as error:
        raise NoSource(f"its instructions cannot be put together again: {error}") from None
    if made.co_freevars != code.co_freevars:
        raise NoSource("its instructions cannot be put together again: other free variables")
    return made


def _beginning(instructions: list[Any]) -> int:
    """The last instruction before the body."""
    first = -1
    for place, one in enumerate(instructions):
        name = getattr(one, "name", "")
        if name in ("RESUME", "GEN_START"):
            return place
        if name not in ("MAKE_CELL", "COPY_FREE_VARS", "RETURN_GENERATOR", "POP_TOP", ""):
            break
    return first


class _Writer:
    """Writes calls of probes, as this Python spells them."""

    def __init__(self, bytecode: Any, code: CodeType, wanted: Wanted) -> None:
        self._bytecode = bytecode
        self._code = code
        self._wanted = wanted
        self._names = {mangled(name, code): name for name in wanted.names}
        self._cells = {*code.co_cellvars, *code.co_freevars}

    def _call(self, probe: str, *arguments: tuple[str, Any]) -> list[tuple[str, Any]]:
        count = len(arguments)
        ends = [("PRECALL", count), ("CALL", count)]
        return [("LOAD_GLOBAL", (True, probe)), *arguments, *ends]

    def _made(self, like: Any, *pairs: tuple[str, Any]) -> list[Any]:
        location = getattr(like, "location", None)
        made = []
        for name, argument in pairs:
            given = (argument,) if argument is not _NOTHING else ()
            made.append(self._bytecode.Instr(name, *given, location=location))
        return made

    def _load(self, name: str) -> tuple[str, Any]:
        if name in self._cells:
            kind = self._bytecode.CellVar if name in self._code.co_cellvars else None
            kind = kind or self._bytecode.FreeVar
            return "LOAD_DEREF", kind(name)
        return "LOAD_FAST", name

    def _probe(self, like: Any, own: str, load: tuple[str, Any]) -> list[Any]:
        name = ("LOAD_CONST", self._names[own])
        call = self._call(rewrite.SEE, ("LOAD_FAST", _CALL), name, load)
        return self._made(like, *call, ("POP_TOP", _NOTHING))

    def start(self, number: int, like: Any) -> list[Any]:
        code = self._code
        this: tuple[str, Any] = ("LOAD_CONST", None)
        if code.co_argcount:
            this = self._load(code.co_varnames[0])
        call = self._call(rewrite.ENTER, ("LOAD_CONST", number), this)
        made = self._made(like, *call, ("STORE_FAST", _CALL))
        for name in arguments_of(code):
            own = mangled(name, code)
            if own in self._names:
                made += self._probe(like, own, self._load(own))
        return made

    def seen(self, like: Any) -> list[Any]:
        own = like.arg if isinstance(like.arg, str) else like.arg.name
        if own not in self._names:
            return []
        load = like.arg
        if like.name == "STORE_GLOBAL" and sys.version_info >= (3, 11):
            load = (False, own)
        return self._probe(like, own, (_STORES[like.name], load))

    def given(self, like: Any) -> list[Any]:
        if not self._wanted.returns:
            return []
        call = self._call(rewrite.GIVE, ("LOAD_FAST", _CALL), ("LOAD_FAST", _VALUE))
        return self._made(like, ("STORE_FAST", _VALUE), *call)

    def end(self, like: Any) -> list[Any]:
        made = self.given(like) if not self._code.co_flags & _GENERATOR else []
        if self._wanted.leaves:
            call = self._call(rewrite.LEAVE, ("LOAD_FAST", _CALL))
            made += self._made(like, *call, ("POP_TOP", _NOTHING))
        return made


_NOTHING = object()
