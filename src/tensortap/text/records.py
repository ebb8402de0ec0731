"""Records and their values as plain text: one line, or one line per leaf."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tensortap import values as frameworks
from tensortap.core.errors import WireError
from tensortap.core.history import payload_nbytes
from tensortap.core.limits import format_size
from tensortap.core.record import Fields, Items, Kind, Mapping, Opaque, Record, TensorData, Value
from tensortap.core.values import leaves
from tensortap.text import tensors
from tensortap.values.view import as_numpy

_SHOWN_PARTS = 4


def record_line(record: Record) -> str:
    """Return one line: the statistics of a tensor, a value, or the message of an alert."""
    if record.kind is Kind.ALERT:
        message = str(_field(record.value, "message") or "")
        return f"hint: {message}" if is_hint(record) else message
    if record.stats is None or isinstance(record.value, TensorData):
        return value_line(record.value)
    line = tensors.line(record.stats, record.dtype, record.shape)
    if not isinstance(record.value, Mapping):
        return line
    # what a `stash=` function returned for this tensor
    stash = [f"{k}={value_line(v)}" for k, v in record.value.items if k != "tensor"]
    return f"{line}; {' '.join(stash)}"


def is_hint(record: Record) -> bool:
    """Return whether a record is an alert that is only a hint."""
    return record.kind is Kind.ALERT and _field(record.value, "severity") == "hint"


def value_line(value: Value) -> str:
    """Return a value in one line; containers show their first parts."""
    if isinstance(value, TensorData):
        try:
            return tensors.describe_array(as_numpy(value), value.dtype, value.shape)
        except (TypeError, ValueError):  # dates and strings have no statistics
            return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, Items):
        return (
            f"{value.kind} of {len(value.items)}: {_first(list(map(value_line, value.items[:5])))}"
        )
    if isinstance(value, Mapping):
        pairs = [f"{value_line(k)}: {value_line(v)}" for k, v in value.items[:5]]
        return f"dict of {len(value.items)}: {_first(pairs)}"
    if isinstance(value, Fields):
        named = list(zip(value.names, value.values, strict=True))[:5]
        name = value.type.rpartition(":")[2]
        return f"{name}({_first([f'{n}={value_line(v)}' for n, v in named])})"
    if isinstance(value, Opaque):
        return f"{value.type}: {value.repr}"
    try:
        return tensors.short(frameworks.rebuild(value))
    except WireError as error:  # one bad value must not hide the others
        return f"<{error}>"


def _first(parts: Sequence[str]) -> str:
    more = ["…"] if len(parts) > _SHOWN_PARTS else []
    return "; ".join([*parts[:_SHOWN_PARTS], *more])


def record_details(record: Record) -> str:
    """Return a few lines: where the record comes from, then one line per leaf of its value."""
    rank = f", rank {record.rank} of {record.world_size}" if record.world_size > 1 else ""
    size = format_size(payload_nbytes(record.value))
    lines = [f"{record.name}  {record.kind.value}  step {record.step}{rank}  {record.type}  {size}"]
    if record.kind is Kind.ALERT:
        return f"{lines[0]}\n  {_field(record.value, 'kind')}: {record_line(record)}"
    if record.stats is not None and not isinstance(record.value, TensorData):
        lines.append(f"  {record_line(record)}")
        if _field(record.value, "tensor") is None:
            return "\n".join(lines)
    for path, leaf in itertools.islice(leaves(record.value, key=value_line), 256):
        lines.append(f"  {path + '  ' if path else ''}{value_line(leaf)}")
    return "\n".join(lines)


def _field(value: Value, key: str) -> Value:
    """Return what a dict holds under `key`; None where there is no such key, or no dict."""
    items = value.items if isinstance(value, Mapping) else ()
    return next((item for name, item in items if name == key), None)
