"""Operations as hooks hand them to the recorder, and the lines of the program that made them.

Hooks hand an `Operation` over while its tensors are still valid. The source keeps digests,
statistics and words, never a tensor.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from tensortap.core.record import Shard, Summary

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"


class SourceLine(NamedTuple):
    """A line of the user's program, and the function that it is in."""

    file: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


class OperationInput(NamedTuple):
    """A tensor that an operation read: what it was before, and a function that returns it.

    `array` returns a NumPy array of what the operation read, or None; call it before the program
    continues.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes | None
    memory: int  # identifies the memory that holds it, while it is valid
    array: Callable[[], Any]


class OperationOutput(NamedTuple):
    """A tensor that an operation wrote or returned."""

    path: str  # empty for the only one
    dtype: str
    shape: tuple[int, ...]
    digest: bytes | None
    stats: Summary | None
    memory: int
    array: Callable[[], Any]
    shard: Shard | None = None
    parameter: str = ""  # which an optimizer updates with it


class Operation(NamedTuple):
    """One operation that has just run.

    `name` is short (``softmax``), `type` what the framework calls it (``aten._softmax.default``).
    `position` counts the operations within the module. `node` names the part of the backward pass
    that ran it, and `scalars` are the arguments that are no tensors, by name.
    """

    name: str
    type: str
    phase: str
    module: str
    call: int
    position: int
    line: SourceLine
    inputs: list[OperationInput]
    outputs: list[OperationOutput]
    scalars: dict[str, Any]
    node: str = ""
    is_view: bool = False  # it computes nothing

    @property
    def place(self) -> str:
        """Return the name of its record, without the path of an output."""
        middle = "" if self.phase == FORWARD else f"{self.phase}:"
        owner = self.module or self.line.function or "program"
        return f"{owner}:{middle}{self.position}:{self.name}"


# -- lines of the user's program -----------------------------------------------------------

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep

USER, PLUMBING, STOP, OWN = range(4)


class SourceLines:
    """Finds the innermost line of the user's program on the stack.

    `plumbing` are folders of code that is not the user's, `stop` files at which to stop looking.
    """

    def __init__(self, plumbing: tuple[str, ...], stop: tuple[str, ...] = ()) -> None:
        self._plumbing, self._stop = plumbing, stop
        self._kinds: dict[CodeType, int] = {}
        self._lines: dict[tuple[CodeType, int], SourceLine] = {}

    def find(self, frame: FrameType | None) -> tuple[int, SourceLine]:
        """Return the kind of the frame that ended the search, and its line if it is the user's."""
        kinds = self._kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = self._kind_of(code)
            if kind == USER:
                at = code, frame.f_lasti
                line = self._lines.get(at)
                if line is None:
                    line = SourceLine(code.co_filename, frame.f_lineno or 0, code.co_qualname)
                    self._lines[at] = line
                return USER, line
            if kind != PLUMBING:
                return kind, NOWHERE
            frame = frame.f_back
        return STOP, NOWHERE

    def _kind_of(self, code: CodeType) -> int:
        file = code.co_filename
        if file in self._stop:
            return STOP
        if file.startswith(_PACKAGE):
            return OWN
        library = file.startswith(_STDLIB) and "site-packages" not in file
        if library or file.startswith(("<frozen", "<string>", "<eval_with_key>")):
            return PLUMBING
        return PLUMBING if file.startswith(self._plumbing) else USER


NOWHERE = SourceLine()


def folder_of(module: str) -> str:
    """Return the folder of an imported package, with a separator at its end."""
    return os.path.dirname(os.path.abspath(str(sys.modules[module].__file__))) + os.sep
