"""Functions without usable source, traced by `sys.monitoring` (Python 3.12 and later).

The interpreter reports the instructions of a chosen code object. An event precedes its
instruction, so a stored value is read at the next event.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType
from typing import Any

from tensortap.sources.tracing.functions import NoSource, argument_names, stored_by, unmangled
from tensortap.sources.tracing.probes import Calls, bind, enter, exit_, result
from tensortap.sources.tracing.rewrite import ProbeSpec

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


_stores: dict[CodeType, _Stores] = {}  # what is monitored
_frames: dict[int, _Frame] = {}  # calls under way, by the id of their frame
_tool: int | None = None  # our number among the tools of `sys.monitoring`


def watch(code: CodeType, number: int, spec: ProbeSpec) -> None:
    """Report what the spec asks of the function with that number."""
    global _tool
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    events = monitoring.events
    if _tool is None:
        _tool = next((one for one in _TOOL_IDS if monitoring.get_tool(one) is None), None)
        if _tool is None:
            raise NoSource("other tools use all ids of sys.monitoring")
        monitoring.use_tool_id(_tool, "tensortap")
        monitoring.register_callback(_tool, events.PY_START, _on_start)
        monitoring.register_callback(_tool, events.PY_RETURN, _on_return)
        monitoring.register_callback(_tool, events.PY_YIELD, _on_yield)
        monitoring.register_callback(_tool, events.INSTRUCTION, _on_instruction)
    _stores[code] = _Stores(code, number, spec)
    chosen = events.PY_START | events.PY_RETURN | events.INSTRUCTION
    if spec.results:
        chosen |= events.PY_YIELD
    monitoring.set_local_events(_tool, code, 0)
    monitoring.set_local_events(_tool, code, chosen)
    monitoring.restart_events()


def forget(code: CodeType) -> None:
    global _tool
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    _stores.pop(code, None)
    if _tool is not None:
        monitoring.set_local_events(_tool, code, 0)
        if not _stores:
            monitoring.free_tool_id(_tool)
            _tool = None
            _frames.clear()


# -- events ---------------------------------------------------------------------------------


def _on_start(code: CodeType, offset: int) -> None:
    stores = _stores.get(code)
    if stores is None:
        return
    frame = sys._getframe(1)
    values = frame.f_locals
    this = values.get(code.co_varnames[0]) if code.co_argcount else None
    if not code.co_argcount and code.co_flags & 4:  # only *args
        this = (values.get(code.co_varnames[code.co_kwonlyargcount]) or (None,))[0]
    calls = enter(stores.number, this)
    if calls is None:
        _frames.pop(id(frame), None)
        return
    if len(_frames) >= _MOST_FRAMES:
        _frames.clear()
    _frames[id(frame)] = _Frame(calls)
    for variable, name in stores.arguments:
        if variable in values:
            bind(calls, name, values[variable])


def _on_instruction(code: CodeType, offset: int) -> object:
    stores = _stores.get(code)
    if stores is None:
        return None
    here = stores.at.get(offset)
    if here is None and offset not in stores.after:
        return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore,no-any-return]
    frame = sys._getframe(1)
    call = _frames.get(id(frame))
    if call is not None:
        if call.stored:
            _report_stored(call, frame)
        if here is not None:
            call.stored = here
    return None


def _on_return(code: CodeType, offset: int, value: object) -> None:
    stores, frame = _stores.get(code), sys._getframe(1)
    call = _frames.pop(id(frame), None)
    if stores is None or call is None:
        return
    if call.stored:
        _report_stored(call, frame)
    if stores.spec.results and not code.co_flags & _GENERATOR:
        result(call.calls, value)
    if stores.spec.exits:
        exit_(call.calls)


def _on_yield(code: CodeType, offset: int, value: object) -> None:
    call = _frames.get(id(sys._getframe(1)))
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
