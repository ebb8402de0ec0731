"""A record in one line, found once."""

from __future__ import annotations

import threading

from tensortap import frameworks as arrays
from tensortap.alerts import alert_of
from tensortap.errors import WireError
from tensortap.frameworks.view import as_numpy
from tensortap.history import payload_nbytes
from tensortap.limits import format_size
from tensortap.record import Fields, Items, Kind, Mapping, Opaque, Record, TensorData, Value
from tensortap.viz import text

_KEPT = 4096
_known: dict[tuple[str, str, int, int, int], str] = {}
_lock = threading.Lock()


def line(record: Record) -> str:
    """The line of a record; of a tensor its statistics, worked out when first asked for."""
    key = (record.name, record.kind.value, record.rank, record.seq, record.time_ns)
    found = _known.get(key)
    if found is None:
        found = _line(record)
        with _lock:
            if len(_known) >= _KEPT:
                for old in list(_known)[: _KEPT // 4]:
                    del _known[old]
            _known[key] = found
    return found


def _line(record: Record) -> str:
    if record.kind is Kind.ALERT:
        return alert_of(record).message
    if record.stats is None or isinstance(record.value, TensorData):
        return describe(record.value)
    words = text.line(record.stats, record.dtype, record.shape)
    return f"{words}; {_extra(record.value)}" if isinstance(record.value, Mapping) else words


def _extra(value: Mapping) -> str:
    """What a `stash=` function said of a tensor."""
    pairs = [f"{k}={describe(v)}" for k, v in value.items if k != "tensor"]
    return " ".join(pairs)


def describe(value: Value) -> str:
    """A neutral value in one line."""
    if isinstance(value, TensorData):
        try:
            array = as_numpy(value)
            return text.describe_array(array, value.dtype, value.shape)
        except (TypeError, ValueError):
            # dates, strings: no statistics, but what it is
            return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, Items):
        return f"{value.kind} of {len(value.items)}: {_some(value.items)}"
    if isinstance(value, Mapping):
        pairs = [f"{describe(k)}: {describe(v)}" for k, v in value.items[:4]]
        return f"dict of {len(value.items)}: {'; '.join(pairs)}{_more(len(value.items))}"
    if isinstance(value, Fields):
        pairs = [f"{n}={describe(v)}" for n, v in zip(value.names, value.values, strict=True)]
        name = value.type.rpartition(":")[2]
        return f"{name}({'; '.join(pairs[:4])}{_more(len(pairs))})"
    if isinstance(value, Opaque):
        return f"{value.type}: {value.repr}"
    try:
        return text.short(arrays.rebuild(value))
    except WireError as error:  # of a stranger: it must not keep the others from being shown
        return f"<{error}>"


def _some(items: tuple[Value, ...]) -> str:
    return "; ".join(describe(item) for item in items[:4]) + _more(len(items))


def _more(count: int) -> str:
    return "; …" if count > 4 else ""


def details(record: Record) -> str:
    """A record in a few lines: where it comes from, and every tensor in it."""
    rank = f", rank {record.rank} of {record.world_size}" if record.world_size > 1 else ""
    size = format_size(payload_nbytes(record.value))
    head = f"{record.name}  {record.kind.value}  step {record.step}{rank}  {record.type}  {size}"
    lines = [head]
    if record.kind is Kind.ALERT:
        return f"{head}\n  {alert_of(record)}"
    if record.stats is not None and not isinstance(record.value, TensorData):
        lines.append(f"  {_line(record)}")
        if record.value is None or _tensor(record.value) is None:
            return "\n".join(lines)
    for path, value in _leaves(record.value, ""):
        lines.append(f"  {path + '  ' if path else ''}{describe(value)}")
    return "\n".join(lines)


def _tensor(value: Value) -> Value:
    """The tensor in what was kept of one, with what a `stash=` function said of it."""
    items = value.items if isinstance(value, Mapping) else ()
    return next((item for name, item in items if name == "tensor"), None)


def _leaves(value: Value, path: str) -> list[tuple[str, Value]]:
    if isinstance(value, Items):
        children = [(f"[{i}]", item) for i, item in enumerate(value.items)]
    elif isinstance(value, Mapping):
        children = [(f"[{describe(key)}]", item) for key, item in value.items]
    elif isinstance(value, Fields):
        names = zip(value.names, value.values, strict=True)
        children = [(f".{name}", item) for name, item in names]
    else:
        return [(path, value)]
    return [leaf for step, child in children[:64] for leaf in _leaves(child, path + step)]
