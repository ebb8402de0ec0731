"""The seam between tensortap and the frameworks whose values it captures.

Everything that knows a framework is in the folder of that framework, behind a `Framework`. To add
one: write ``frameworks/<name>/adapter.py`` with a ``FRAMEWORK`` in it, add one line to
`tensortap.values.registry`, add its spellings to the rows of `tensortap.core.dtypes`, and let its
tests subclass ``tests/frameworks/contract.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from tensortap.core.errors import CaptureError
from tensortap.core.record import Shard, Summary, TensorData, Value

if TYPE_CHECKING:  # protocols and records of other verbs than `catch`, which loads this file
    from numpy.typing import NDArray

    from tensortap.core.buffers import Pool
    from tensortap.rooms.bisect.grafting import GraftHooks, GraftSource
    from tensortap.rooms.blackbox.replaying import Training
    from tensortap.rooms.ops.operations import OperationObserver
    from tensortap.rooms.track.observing import (
        Hooks,
        ModelTracing,
        Probe,
        RankChannel,
        RankStore,
        TrackHooks,
        TrackObserver,
        WatchObserver,
    )
    from tensortap.rooms.widths.training import WidthTask, WidthTraining
    from tensortap.stats.columns import Memory

SMALL = 16 << 10
"""Payloads up to this many bytes become `bytes`; larger ones are leased from the pool."""

Path: TypeAlias = tuple[int, ...]
"""The ids of the containers around a value, which tell cycles and the depth of nesting."""

Snapshot: TypeAlias = tuple[Value, int]
"""The copy of a value as a tree of `tensortap.core.record`, and the payload bytes that it holds."""


class PendingSummary(NamedTuple):
    """Statistics that a device is still computing; `resolve` waits for them."""

    ready: Callable[[], bool]
    resolve: Callable[[], Summary | None]


class PendingDigest(NamedTuple):
    """A digest that a device is still computing; `resolve` waits for it."""

    ready: Callable[[], bool]
    resolve: Callable[[], bytes]


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
    - `summarize` computes the statistics without a copy, or starts to on a device;
    - `memory` returns where the elements are, for the kernel; None if it cannot read them;
    - `view` returns a NumPy array over the value's own memory; None where that is impossible;
    - `digest_later` starts to compute the digest of a shard on a device; None for other tensors;
    - `local_shard` returns this rank's part of a distributed tensor and where it belongs;
    - `copy` returns a private copy on the same device, outside of every graph;
    - `keyed_copy` returns such a copy with a key that is equal for equal contents, in one go; None
      for values that need the general way. A copy may be `compact`: its ``tensor()`` is the value.
    """

    snapshot: Callable[[Any, Pool | None, Path], Snapshot]
    nbytes: Callable[[Any, Path], int]
    describe: Callable[[Any], tuple[str, tuple[int, ...]]] = no_description
    snapshot_small: Callable[[Any], Snapshot | None] | None = None
    summarize: Callable[[Any], Summary | PendingSummary] | None = None
    view: Callable[[Any], NDArray[Any] | None] | None = None
    local_shard: Callable[[Any], tuple[Any, Shard]] | None = None
    copy: Callable[[Any], Any] | None = None
    keyed_copy: Callable[[Any], tuple[Hashable, Any] | None] | None = None
    compact: type | None = None
    memory: Callable[[Any], Memory | None] | None = None
    in_place: InPlace | None = None
    digest_later: Callable[[Any, Shard | None], PendingDigest | None] | None = None


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
    """One framework: its values, and the hooks that it offers.

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

    def save(self, value: Any, path: FilePath) -> None:
        """Write a value to a file in the framework's own format."""
        raise CaptureError(f"{self.name} has no file format of its own")

    def load(self, file: FilePath, *, trust: bool, mapped: bool = False) -> Any:
        """Read a file in the framework's own format.

        Raise `pickle.UnpicklingError` if it could run code, unless it is trusted. With `mapped`,
        tensors stay in the file where possible.
        """
        raise CaptureError(f"{self.name} has no file format of its own")

    def track(self, model: Any, optimizer: Any, observer: TrackObserver) -> TrackHooks | None:
        """Return hooks that track a model; None if it is not a model of this framework."""
        return None

    def track_states(
        self, model_state: Any, optimizer_state: Any, observer: TrackObserver
    ) -> TrackHooks | None:
        """Return hooks for a program with explicit states; None if the framework has none."""
        return None

    def traced_classes(self) -> Iterable[type]:
        """Return the classes of values that exist only while a function is being compiled."""
        return ()

    def catch_when_run(
        self, value: Any, capture: Callable[..., object], when: Any, shard: Any = None
    ) -> Callable[[], object]:
        """Make the function that is being compiled call ``capture(value, when=when)`` when it runs.

        A `CompiledRun` as argument `run` says on which device, if there are several, and `shard`
        how the values of the devices make up the whole. Return a function that waits until running
        functions have done so.
        """
        raise CaptureError(f"{self.name} has no values of functions that are being compiled")

    def catch_gradient(self, value: Any, capture: Callable[[Any], object]) -> Any:
        """Return the value such that each gradient of it is handed to `capture`; None if foreign.

        While a function is being compiled, `capture` gets what stands for the gradient there.
        """
        return None

    def watch(self, target: Any, observer: WatchObserver, title: str) -> Hooks | None:
        """Return hooks that watch a model, parameter or tensor; None if it is none of these."""
        return None

    def without_graph(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which operations are not recorded for gradients."""
        return contextlib.nullcontext()

    def version_of(self, value: Any) -> int:
        """Return a number that grows when a tensor is changed in place; 0 if nobody counts."""
        return 0

    def survives_fork(self) -> bool:
        """Return whether a fork of this process can use the framework."""
        return True

    def after_fork(self) -> None:
        """Make the framework usable in a fork of the training process."""
        return

    def stack(self, name: str, values: list[Any], fill: float) -> Any:
        """Return values stacked along a new first dimension, padded with `fill`; None for others.

        Errors name what is stacked, `name`.
        """
        return None

    def open_channel(self, group: Any) -> RankChannel | None:
        """Connect the ranks of a process group; None if there is none, or only this rank."""
        return None

    def operations(self, model: Any, observer: OperationObserver) -> Hooks | None:
        """Return hooks that report every operation; None if it is not a model of this framework.

        Without a model they report the operations of any program.
        """
        return None

    def open_store(self) -> Callable[[str], RankStore] | None:
        """Return what opens a store of the job's ranks; None if there is none, or only this rank.

        It takes a name, the same on all ranks that share the store, and may wait for the network.
        """
        return None

    def training(self, model: Any, optimizer: Any, others: tuple[Any, ...]) -> Training | None:
        """Return a program whose steps can be run again; None for models of others."""
        return None

    def graft(self, model: Any, source: GraftSource) -> GraftHooks | None:
        """Return hooks that exchange tensors with recorded ones; None for models of others."""
        return None

    def width_training(self, model: Any, optimizer: Any, task: WidthTask) -> WidthTraining | None:
        """Return a model that is trained on one batch; None for models of others."""
        return None

    def trained_models(
        self,
        begin: Callable[[Any, Sequence[Any]], Callable[[], None]],
        fault: Callable[[Exception], None],
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which `begin` gets each model that is trained, and its optimizers.

        It returns what to call at the end of each step; `fault` gets what goes wrong.
        """
        return contextlib.nullcontext()

    def keeping_random_state(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context after which the random state is as it was."""
        return contextlib.nullcontext()

    def seed(self, number: int) -> None:
        """Seed the random numbers of the framework, if it has a global state of them."""
        return

    def tracing(self) -> ModelTracing | None:
        """Return what `trace` needs to know about models."""
        return None

    def find_probes(
        self, model: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Sequence[Probe] | None:
        """Run a model once and return what can be watched; None for models of others."""
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
