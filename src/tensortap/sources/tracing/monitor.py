"""Functions whose source is not at hand, on Python 3.12 and later: `sys.monitoring`.

The interpreter tells of the instructions of one code object and of no other. An event comes before
its instruction: what a store has stored is there at the next one.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from tensortap.sources.tracing.functions import arguments_of, mangled
from tensortap.sources.tracing.rewrite import NoSource
from tensortap.sources.tracing.wanted import Wanted

if TYPE_CHECKING:
    from tensortap.sources.tracing.calls import Opened, Site

_TOOLS = (4, 3, 5, 2, 1, 0)  # debuggers, coverage tools and profilers have theirs
_MOST = 1000  # calls that ended by an error and are not forgotten yet


class Stores:
    """Where a code object binds wanted names."""

    def __init__(self, code: CodeType, wanted: Wanted) -> None:
        names = {mangled(name, code): name for name in wanted.names}
        self.at: dict[int, list[tuple[str, str]]] = {}
        self.after: set[int] = set()
        before = None
        for instruction in dis.get_instructions(code):
            if before in self.at:
                self.after.add(instruction.offset)
            before = instruction.offset
            bound = [(name, names[name]) for name in stored(instruction) if name in names]
            if bound:
                self.at[before] = bound
        self.arguments = [(mangled(name, code), name) for name in arguments_of(code)]
        self.arguments = [pair for pair in self.arguments if pair[1] in wanted.names]
        self.wanted = wanted


def stored(instruction: dis.Instruction) -> tuple[str, ...]:
    """The names that an instruction binds."""
    name, value = instruction.opname, instruction.argval
    if name in ("STORE_FAST", "STORE_DEREF", "STORE_GLOBAL"):
        return (value,)
    if name == "STORE_FAST_STORE_FAST":
        return tuple(value)
    return (value[0],) if name == "STORE_FAST_LOAD_FAST" else ()


class _Frame:
    """One call under way."""

    __slots__ = ("opened", "stored")

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.stored: list[tuple[str, str]] = []


class Monitored:
    """Events of the interpreter, for the one code object alone."""

    def put(self, site: Site, wanted: Wanted, anyone: bool) -> None:
        """Ask for the events of the function."""
        if not hasattr(sys, "monitoring"):
            raise NoSource(
                "tracing it without its source needs Python 3.12 or later: define it in a file "
                "that does not change while the program runs, or use a newer Python"
            )
        if not (wanted.names or wanted.returns or wanted.leaves):
            raise NoSource("functions inside a function are seen only where there is source")
        _tool.watch(site, wanted)

    def remove(self, site: Site) -> None:
        """Ask for no more of them."""
        _tool.forget(site)


class _Tool:
    """Our place among the tools that monitor."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.sites: dict[CodeType, tuple[Site, Stores]] = {}
        self.frames: dict[int, _Frame] = {}

    def watch(self, site: Site, wanted: Wanted) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        if self.number is None:
            self.number = self._take(monitoring)
        code = site.original
        self.sites[code] = (site, Stores(code, wanted))
        events = monitoring.events
        chosen = events.PY_START | events.PY_RETURN | events.INSTRUCTION
        if wanted.returns:
            chosen |= events.PY_YIELD
        monitoring.set_local_events(self.number, code, 0)
        monitoring.set_local_events(self.number, code, chosen)
        monitoring.restart_events()

    def _take(self, monitoring: Any) -> int:
        free = [one for one in _TOOLS if monitoring.get_tool(one) is None]
        if not free:
            raise NoSource("every place for a tool of sys.monitoring is taken")
        number = free[0]
        monitoring.use_tool_id(number, "tensortap")
        events = monitoring.events
        monitoring.register_callback(number, events.PY_START, self.on_start)
        monitoring.register_callback(number, events.PY_RETURN, self.on_return)
        monitoring.register_callback(number, events.PY_YIELD, self.on_yield)
        monitoring.register_callback(number, events.INSTRUCTION, self.on_instruction)
        return number

    def forget(self, site: Site) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        self.sites.pop(site.original, None)
        if self.number is not None:
            monitoring.set_local_events(self.number, site.original, 0)
            if not self.sites:
                monitoring.free_tool_id(self.number)
                self.number = None
                self.frames.clear()

    # -- events --------------------------------------------------------------------------

    def on_start(self, code: CodeType, offset: int) -> None:
        from tensortap.sources.tracing.calls import enter, see

        known = self.sites.get(code)
        if known is None:
            return
        site, stores = known
        frame = sys._getframe(1)
        values = _locals(frame)
        this = values.get(code.co_varnames[0]) if code.co_argcount else None
        if not code.co_argcount and code.co_flags & 4:  # only *args
            given = values.get(code.co_varnames[code.co_kwonlyargcount]) or (None,)
            this = given[0]
        opened = enter(site.number, this)
        if opened is None:
            self.frames.pop(id(frame), None)
            return
        if len(self.frames) >= _MOST:
            self.frames.clear()
        self.frames[id(frame)] = _Frame(opened)
        for own, name in stores.arguments:
            if own in values:
                see(opened, name, values[own])

    def on_instruction(self, code: CodeType, offset: int) -> object:
        known = self.sites.get(code)
        if known is None:
            return None
        stores = known[1]
        here = stores.at.get(offset)
        if here is None and offset not in stores.after:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore,no-any-return]
        frame = sys._getframe(1)
        call = self.frames.get(id(frame))
        if call is None:
            return None
        if call.stored:
            self._see(call, frame)
        if here is not None:
            call.stored = here
        return None

    def _see(self, call: _Frame, frame: FrameType) -> None:
        from tensortap.sources.tracing.calls import see

        bound, call.stored = call.stored, []
        values = _locals(frame)
        for own, name in bound:
            if own in values:
                see(call.opened, name, values[own])
            elif own in frame.f_globals:
                see(call.opened, name, frame.f_globals[own])

    def on_return(self, code: CodeType, offset: int, value: object) -> None:
        from tensortap.sources.tracing.calls import give, leave

        known, frame = self.sites.get(code), sys._getframe(1)
        call = self.frames.pop(id(frame), None)
        if known is None or call is None:
            return
        if call.stored:
            self._see(call, frame)
        wanted = known[1].wanted
        if wanted.returns and not code.co_flags & 0x220:  # not of generators
            give(call.opened, value)
        if wanted.leaves:
            leave(call.opened)

    def on_yield(self, code: CodeType, offset: int, value: object) -> None:
        from tensortap.sources.tracing.calls import give

        call = self.frames.get(id(sys._getframe(1)))
        if call is not None and code.co_flags & 0x220:
            give(call.opened, value)


def _locals(frame: FrameType) -> dict[str, Any]:
    return frame.f_locals


_tool = _Tool()
