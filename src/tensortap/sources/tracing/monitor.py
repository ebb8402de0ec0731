"""Functions without usable source, traced by `sys.monitoring` (Python 3.12 and later).

The interpreter reports the instructions of a chosen code object. An event precedes its
instruction, so a stored value is read at the next event.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType
from typing import Any

from tensortap.sources.tracing.functions import argument_names, stored_by, unmangled
from tensortap.sources.tracing.probes import Calls, bind, enter, exit_, result
from tensortap.sources.tracing.rewrite import ProbeSpec
from tensortap.sources.tracing.source import NoSource

_TOOL_IDS = (4, 3, 5, 2, 1, 0)  # debuggers, coverage tools and profilers have theirs
_MOST_FRAMES = 1000  # calls that ended with an error and are still in the table
_GENERATOR = 0x220

_Bound = list[tuple[str, str]]  # names of variables: in the code, in the source


def check(code: CodeType, spec: ProbeSpec, reason: Exception) -> None:
    """Raise NoSource if monitoring cannot serve instead of the source, given why that failed."""
    if not hasattr(sys, "monitoring"):
        raise NoSource(
            f"{reason}, and tracing {code.co_qualname} without its source needs Python 3.12 or "
            "later: define it in a file that stays as it was loaded, or use a newer Python"
        )
    if not (spec.names or spec.results or spec.exits):
        raise NoSource(f"{reason}, and nested functions can be traced only with their source")


def watch(code: CodeType, number: int, spec: ProbeSpec) -> None:
    """Report what the spec asks of the function with that number."""
    _tool.watch(code, _Stores(code, number, spec))


def forget(code: CodeType) -> None:
    """Stop reporting."""
    _tool.forget(code)


class _Stores:
    """Offsets at which a code object binds traced names."""

    def __init__(self, code: CodeType, number: int, spec: ProbeSpec) -> None:
        self.number = number  # of the function
        self.spec = spec
        self.at: dict[int, _Bound] = {}
        self.after: set[int] = set()
        before = None
        for instruction in dis.get_instructions(code):
            if before in self.at:
                self.after.add(instruction.offset)
            before = instruction.offset
            bound = [(name, unmangled(name, code)) for name in stored_by(instruction)]
            if bound := [pair for pair in bound if pair[1] in spec.names]:
                self.at[before] = bound
        names = zip(code.co_varnames, argument_names(code), strict=False)
        self.arguments = [pair for pair in names if pair[1] in spec.names]


class _Frame:
    """One call under way."""

    __slots__ = ("calls", "stored")

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.stored: _Bound = []


class _Tool:
    """Our entry among the tools of `sys.monitoring`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.stores: dict[CodeType, _Stores] = {}
        self.frames: dict[int, _Frame] = {}

    def watch(self, code: CodeType, stores: _Stores) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        events = monitoring.events
        if self.number is None:
            self.number = self._register(monitoring)
        self.stores[code] = stores
        chosen = events.PY_START | events.PY_RETURN | events.INSTRUCTION
        if stores.spec.results:
            chosen |= events.PY_YIELD
        monitoring.set_local_events(self.number, code, 0)
        monitoring.set_local_events(self.number, code, chosen)
        monitoring.restart_events()

    def _register(self, monitoring: Any) -> int:
        free = [number for number in _TOOL_IDS if monitoring.get_tool(number) is None]
        if not free:
            raise NoSource("other tools use all ids of sys.monitoring")
        monitoring.use_tool_id(free[0], "tensortap")
        for event, callback in (
            ("PY_START", self.on_start),
            ("PY_RETURN", self.on_return),
            ("PY_YIELD", self.on_yield),
            ("INSTRUCTION", self.on_instruction),
        ):
            monitoring.register_callback(free[0], getattr(monitoring.events, event), callback)
        return int(free[0])

    def forget(self, code: CodeType) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        self.stores.pop(code, None)
        if self.number is not None:
            monitoring.set_local_events(self.number, code, 0)
            if not self.stores:
                monitoring.free_tool_id(self.number)
                self.number = None
                self.frames.clear()

    # -- events --------------------------------------------------------------------------

    def on_start(self, code: CodeType, offset: int) -> None:
        stores = self.stores.get(code)
        if stores is None:
            return
        frame = sys._getframe(1)
        values = frame.f_locals
        this = values.get(code.co_varnames[0]) if code.co_argcount else None
        if not code.co_argcount and code.co_flags & 4:  # only *args
            this = (values.get(code.co_varnames[code.co_kwonlyargcount]) or (None,))[0]
        calls = enter(stores.number, this)
        if calls is None:
            self.frames.pop(id(frame), None)
            return
        if len(self.frames) >= _MOST_FRAMES:
            self.frames.clear()
        self.frames[id(frame)] = _Frame(calls)
        for variable, name in stores.arguments:
            if variable in values:
                bind(calls, name, values[variable])

    def on_instruction(self, code: CodeType, offset: int) -> object:
        stores = self.stores.get(code)
        if stores is None:
            return None
        here = stores.at.get(offset)
        if here is None and offset not in stores.after:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore,no-any-return]
        frame = sys._getframe(1)
        call = self.frames.get(id(frame))
        if call is not None:
            if call.stored:
                _report_stored(call, frame)
            if here is not None:
                call.stored = here
        return None

    def on_return(self, code: CodeType, offset: int, value: object) -> None:
        stores, frame = self.stores.get(code), sys._getframe(1)
        call = self.frames.pop(id(frame), None)
        if stores is None or call is None:
            return
        if call.stored:
            _report_stored(call, frame)
        if stores.spec.results and not code.co_flags & _GENERATOR:
            result(call.calls, value)
        if stores.spec.exits:
            exit_(call.calls)

    def on_yield(self, code: CodeType, offset: int, value: object) -> None:
        call = self.frames.get(id(sys._getframe(1)))
        if call is not None and code.co_flags & _GENERATOR:
            result(call.calls, value)


def _report_stored(call: _Frame, frame: FrameType) -> None:
    bound, call.stored = call.stored, []
    values = frame.f_locals
    for variable, name in bound:
        if variable in values:
            bind(call.calls, name, values[variable])
        elif variable in frame.f_globals:
            bind(call.calls, name, frame.f_globals[variable])


_tool = _Tool()
