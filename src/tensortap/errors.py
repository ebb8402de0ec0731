"""Everything that tensortap raises.

    TensortapError
    ├── CaptureError      a value that cannot be caught (sparse, quantized, deleted, traced)
    ├── NotFound          no such name, step, rank or live session
    ├── WireError         a message that is not what it claims to be
    ├── Refused           the other side said no: wrong key, other protocol version
    ├── SchemaError       a frame that is no LogFrame
    ├── StopTraining      an alert that was told to stop the training
    └── MissingExtra      a library that an extra of tensortap brings

Inside a training loop none of them is raised: they are counted and logged once, unless
``TENSORTAP_STRICT=1``. `StopTraining` is the exception: it is raised where it was asked for.
"""

from __future__ import annotations


class TensortapError(Exception):
    """The base of all errors that tensortap raises."""


class CaptureError(TensortapError):
    """A value that cannot be caught, with what to catch instead."""


class NotFound(TensortapError, LookupError):
    """Nothing is held under what was asked for."""


class WireError(TensortapError):
    """A message that is not what it claims to be."""


class Refused(TensortapError):
    """The other side of a connection said no, and why."""


class SchemaError(TensortapError, ValueError):
    """A frame that has not the columns of a LogFrame, and which it lacks."""


class StopTraining(TensortapError):
    """An alert came, and alerts were told to stop the training; `alert` is the one."""

    def __init__(self, message: str, alert: object = None) -> None:
        super().__init__(message)
        self.alert = alert


class MissingExtra(TensortapError, ImportError):
    """A library is missing that an extra of tensortap brings."""
