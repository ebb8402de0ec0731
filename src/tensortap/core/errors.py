"""All errors that tensortap raises.

    TensortapError
    ├── CaptureError      a value cannot be captured (sparse, quantized, deleted, traced)
    ├── NotFound          no such name, step, rank or live session
    ├── WireError         a malformed message
    ├── Refused           the other side rejected the connection: wrong key, other protocol
    ├── PatternError      a regular expression is invalid
    ├── SchemaError       a frame is not a LogFrame
    ├── StopTraining      an alert stopped the training
    ├── UntrustedFile     a file may run code when it is read
    ├── MissingExtra      an optional library is not installed
    ├── MissingRoom       no installed room has this capability
    └── others in the module that raises them, such as CorruptFile

Inside a training loop errors are counted and logged once; ``TENSORTAP_STRICT=1`` raises them.
`StopTraining` is always raised, because the user asked for it.
"""

from __future__ import annotations


class TensortapError(Exception):
    """Base class of all errors that tensortap raises."""


class CaptureError(TensortapError):
    """A value that cannot be captured; the message says what to capture instead."""


class NotFound(TensortapError, LookupError):
    """No such name, step, rank, run or live session."""


class WireError(TensortapError):
    """A malformed message."""


class Refused(TensortapError):
    """The other side rejected the connection; the message says why."""


class PatternError(TensortapError, ValueError):
    """A text that is not a regular expression."""


class SchemaError(TensortapError, ValueError):
    """A frame without the columns of a LogFrame; the message names what is missing."""


class StopTraining(TensortapError):
    """Raised by an alert that was told to stop the training; `alert` is the alert."""

    def __init__(self, message: str, alert: object = None) -> None:
        super().__init__(message)
        self.alert = alert


class UntrustedFile(TensortapError):
    """A file that may run code when it is read; `trust=True` reads it all the same."""


class MissingExtra(TensortapError, ImportError):
    """An optional library is not installed; the message names the command that installs it."""

    @classmethod
    def of(cls, message: str, extra: str) -> MissingExtra:
        """Return the error with the command for an extra.

        It names packages, which works in a clone and from an index alike.

        >>> MissingExtra.of("HDF5 needs h5py", "hdf5")
        MissingExtra('HDF5 needs h5py: pip install h5py')
        """
        import re
        from importlib.metadata import requires

        pattern = rf"^([\w-]+).*; extra == ['\"]{extra}['\"]$"
        names = re.findall(pattern, "\n".join(requires("tensortap") or ()), re.MULTILINE)
        return cls(f"{message}: pip install {' '.join(names)}")


class MissingRoom(TensortapError, LookupError):
    """No installed room has this capability; the message names what is missing."""
