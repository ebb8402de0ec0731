"""Everything that tensortap raises.

    TensortapError
    ├── CaptureError      a value that cannot be caught (sparse, quantized, deleted, traced)
    ├── NotFound          no such name, step, rank or live session
    ├── WireError         a message that is not what it claims to be
    ├── Refused           the other side said no: wrong key, other protocol version
    └── MissingExtra      a library that an extra of tensortap brings

Inside a training loop none of them is raised: they are counted and logged once, unless
``TENSORTAP_STRICT=1``.
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


class MissingExtra(TensortapError, ImportError):
    """A library is missing that an extra of tensortap brings."""
