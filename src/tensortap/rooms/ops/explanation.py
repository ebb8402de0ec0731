"""The explanation of a bad operation, as an alert carries it: lines, operands, what led there."""

from __future__ import annotations

from typing import Annotated

import msgspec

# bounds on what a run may contain: it may come from anyone
_Text = Annotated[str, msgspec.Meta(max_length=4000)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Operand(msgspec.Struct, frozen=True):
    """A tensor that the operation read or wrote: its name, and its statistics in words."""

    name: _Text
    values: _Text


class ChainLink(msgspec.Struct, frozen=True):
    """An operation that led to the bad one: its record, its line, and what it made."""

    name: _Text
    operation: _Text
    line: _Text
    code: _Text
    output: _Text


class OperationExplanation(msgspec.Struct, frozen=True):
    """The operation behind an alert: its line, its operands, and the operations before it.

    `source` holds the lines around `line`, the first of which has the number `first_line`.
    """

    name: _Text
    operation: _Text
    phase: _Text
    module: _Text
    why: _Text
    file: _Text = ""
    line: _Count = 0
    function: _Text = ""
    first_line: _Count = 0
    source: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=32)] = ()
    operands: Annotated[tuple[Operand, ...], msgspec.Meta(max_length=32)] = ()
    chain: Annotated[tuple[ChainLink, ...], msgspec.Meta(max_length=32)] = ()

    def __repr__(self) -> str:
        return f"<explanation of {self.name}: {self.why}>"

    @property
    def place(self) -> str:
        """The line as ``file:line``; empty if it is not known."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def code(self) -> str:
        """The text of the line."""
        at = self.line - self.first_line
        return self.source[at].strip() if 0 <= at < len(self.source) else ""


def decode_explanation(text: str) -> OperationExplanation | None:
    """Return the explanation in the JSON of a record; None if there is none or it is malformed."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=OperationExplanation)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
