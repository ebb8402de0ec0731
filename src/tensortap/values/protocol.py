"""The seam between tensortap and the frameworks whose values it captures.

Everything that knows the values of a framework is in its folder, behind a `Framework`. To add one:
write ``values/<name>/adapter.py`` with a ``FRAMEWORK`` in it, add one line to
`tensortap.values.registry`, add its spellings to the rows of `tensortap.core.dtypes`, and let its
tests subclass ``tests/values/contract.py``. Hooks into models belong to rooms: see `parts` there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from tensortap.core.errors import CaptureError
from tensortap.core.record import Shard, Summary, TensorData, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.core.buffers import Pool
    from tensortap.stats.columns import Memory

SMALL = 16 << 10
"""Payloads up to this many bytes become `bytes`; larger ones are leased from the pool."""

Path: TypeAlias = tuple[int, ...]
"""The ids of the containers around a value, which tell cycles and the depth of nesting."""

Snapshot: TypeAlias = tuple[Value, int]
"""The copy of a value as a tree of `tensortap.core.record`, and the payload bytes that it holds."""


def no_description(value: object) -> tuple[str, tuple[int, ...]]:
    """Return the empty dtype and shape of a value that has neither."""
    return "", ()


@dataclass(frozen=True, slots=True)
class Adapter:
    """The operations on the values of one class.

    `snapshot` copies all bytes; without a pool it borrows large
    payloads instead, which are then the user's memory, valid until the user changes it. The others
    are for tensors:

    - `snapshot_small` is `snapshot` for the fast path: None if the value is not small;
    - `in_place` lets the fast path copy the bytes of most small tensors itself;
    - `summarize` computes the statistics, without a copy where the memory can be read;
    - `memory` returns where the elements are, for the kernel; None if it cannot read them;
    - `view` returns a NumPy array over the value's own memory; None where that is impossible;
    - `local_shard` returns this rank's part of a distributed tensor and where it belongs;
    - `copy` returns a private copy on the same device, outside of every graph.
    """

    snapshot: Callable[[Any, Pool | None, Path], Snapshot]
    nbytes: Callable[[Any, Path], int]
    describe: Callable[[Any], tuple[str, tuple[int, ...]]] = no_description
    snapshot_small: Callable[[Any], Snapshot | None] | None = None
    summarize: Callable[[Any], Summary] | None = None
    view: Callable[[Any], NDArray[Any] | None] | None = None
    local_shard: Callable[[Any], tuple[Any, Shard]] | None = None
    copy: Callable[[Any], Any] | None = None
    memory: Callable[[Any], Memory | None] | None = None
    in_place: InPlace | None = None


class InPlace(NamedTuple):
    """The layout by which the fast path reads a small tensor in place, if it is like torch's.

    `dtypes` has the name, the item size, and which lazy views there are of each dtype: 0 none, 1
    negative, 2 negative or conjugate. If `overridden((tensor,))` is true, nothing is read.
    """

    framework: str
    dtypes: dict[Any, tuple[str, int, int]]
    overridden: Callable[[tuple[Any]], bool]


class CompiledRun(NamedTuple):
    """One run of compiled code: on which of several devices, and shard and tags of its value."""

    device: int = 0
    devices: int = 1
    tags: dict[str, str] = {}  # noqa: RUF012  never changed
    shard: Shard | None = None


class Framework(Protocol):
    """The values of one framework.

    Implementations subclass this. The module of a framework is imported only after the user has
    imported the framework, except to rebuild a tensor that came from another process.
    """

    name: str
    """The value of `TensorData.framework` for its tensors."""

    def adapter(self, cls: type) -> Adapter | None:
        """Return the adapter for a class of values; None if the class is another framework's."""

    def rebuild(self, tensor: TensorData) -> Any:
        """Return a tensor with these bytes on the CPU that belongs to the caller.

        Return a NumPy array where this release of the framework lacks the dtype.
        """

    # Optional: a framework inherits what it has nothing special for.

    def traced_classes(self) -> Iterable[type]:
        """Return the classes of values that exist only while a function is being compiled."""
        return ()

    def catch_when_run(
        self, value: Any, capture: Callable[..., object], when: Any
    ) -> Callable[[], object]:
        """Make the function that is being compiled call ``capture(value, when=when)`` when it runs.

        A `CompiledRun` as argument `run` says on which device, if there are several. Return a
        function that waits until running functions have done so.
        """
        raise CaptureError(f"{self.name} has no values of functions that are being compiled")

    def catch_gradient(self, value: Any, capture: Callable[[Any], object]) -> Any:
        """Return the value such that each gradient of it is handed to `capture`; None if foreign.

        While a function is being compiled, `capture` gets what stands for the gradient there.
        """
        return None


def rejecting(message: str) -> Adapter:
    """Return the adapter of tensors that cannot be captured; `message` names a remedy."""

    def snapshot(value: Any, pool: Pool | None, path: Path) -> Snapshot:
        raise CaptureError(message)

    return Adapter(snapshot, lambda value, path: 0, view=lambda value: None)


def type_name(cls: type) -> str:
    """Return the full name of a class.

    >>> type_name(float)
    'builtins.float'
    """
    return f"{cls.__module__}.{cls.__qualname__}"
