"""The record: what flows from a source to every sink, reader and view.

A record is frozen and does not depend on any framework. Its value is a tree of plain Python
scalars, `TensorData` leaves and containers. Memory, wire and run use the same structs, so that
nothing is converted on the way.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import msgspec


class Kind(enum.StrEnum):
    """The kind of thing that a record describes."""

    VALUE = "Value"
    ACTIVATION = "Activation"
    GRADIENT = "Gradient"
    WEIGHT = "Weight"
    WEIGHT_GRADIENT = "Weight_Gradient"
    OPTIMISER_STATE = "Optimiser_State"
    LOCAL = "Local"
    OP = "Op"
    HEALTH = "Health"
    METRIC = "Metric"
    ALERT = "Alert"

    __hash__ = str.__hash__  # faster than that of an enum, which is a Python call


class TensorData(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="node", tag="t"):
    """One tensor, independent of its framework.

    `framework` is where it came from: ``numpy``, ``numpy.generic`` (a NumPy scalar), ``torch``,
    ``jax`` or ``mlx``. `data` holds the bytes, C-contiguous: `bytes` if they are few, else a
    `tensortap.core.buffers.Block`.
    """

    framework: str
    dtype: str
    shape: tuple[int, ...]
    data: Any


class Items(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="node", tag="i"):
    """A list, tuple, set or frozenset, as `kind` says."""

    kind: str
    items: tuple[Value, ...]


class Mapping(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="node", tag="m"):
    """A dict, in its order of insertion."""

    items: tuple[tuple[Value, Value], ...]


class Fields(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="node", tag="f"):
    """A namedtuple or a dataclass; `type` is ``module:qualname`` of its class."""

    kind: str
    type: str
    names: tuple[str, ...]
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.values):
            raise ValueError(f"{len(self.names)} names for {len(self.values)} values")


class Number(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="node", tag="n"):
    """A number that MessagePack cannot hold: a complex, or an int beyond 64 bits (as text)."""

    kind: str
    parts: tuple[float, ...] = ()
    text: str = ""


class Blob(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="node", tag="b"):
    kind: str
    data: bytes


class Opaque(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="node", tag="o"):
    """Any other Python object, of which only type and repr are kept."""

    type: str
    repr: str


Value: TypeAlias = (
    None | bool | int | float | str | TensorData | Items | Mapping | Fields | Number | Blob | Opaque
)


class Shard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a distributed tensor that a record holds."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    placements: tuple[str, ...] = ()


class Summary(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Statistics over the finite values of a tensor, and counts of the others.

    Exponent bin `n` counts values with ``2**n <= |x| < 2**(n+1)``. `bins` is dense and starts at
    `first_bin`.
    """

    count: int
    zeros: int
    nans: int
    posinfs: int
    neginfs: int
    min: float
    max: float
    mean: float
    std: float
    mean_abs: float
    max_abs: float
    min_abs: float
    rm2: float
    rm4: float
    rm8: float
    first_bin: int = 0
    bins: tuple[int, ...] = ()

    @property
    def exponents(self) -> dict[int, int]:
        """Counts by exponent bin, without empty bins."""
        return {self.first_bin + i: n for i, n in enumerate(self.bins) if n}

    @property
    def finite(self) -> int:
        return self.count - self.nans - self.posinfs - self.neginfs


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One observation of one value.

    `step` is the training step, `call` which call of that name within the step, and `seq` the
    order of capture within the rank. Records are ordered by (step, seq, rank).
    """

    name: str
    kind: Kind
    step: int
    call: int
    seq: int
    rank: int
    world_size: int
    time_ns: int
    type: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    shard: Shard | None = None
    digest: bytes | None = None
    value: Value = None
    stats: Summary | None = None
    tags: dict[str, str] = {}
