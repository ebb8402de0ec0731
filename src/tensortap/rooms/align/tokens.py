"""Describe the tokens of a batch: a record beside the values, to which their tags refer.

The record holds the ids as they were passed, padding included. The identity of a token, the hash of
its context, is computed from it when runs are aligned: training pays for one copy of the ids.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensortap import values as arrays
from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.errors import CaptureError
from tensortap.core.record import Kind, Record

TOKENS = "tokens"  # the name of the record, and the tag by which values refer to its `seq`
STEPPED = "stepped"  # the tag of tokens that belong to a training step

_RECENT = 16  # batches that values may still refer to
_INTEGER = ("int", "uint")


class _Batch(NamedTuple):
    counters: object  # of the run: another one, or a forked process, knows no batches
    queues: object
    names: tuple[str, ...]
    step: int | None
    marks: tuple[_Mark, ...]
    tags: dict[str, str]


class _Mark(NamedTuple):
    """The identity of a tensor: itself and how often it was changed, or its content."""

    reference: Callable[[], Any]
    version: object

    @classmethod
    def of(cls, given: Any) -> _Mark:
        if given is None:
            return cls(type(None), None)
        try:
            version = given._version
        except AttributeError:
            return cls(type(None), arrays.digest_of(given))
        except RuntimeError:  # an inference tensor counts no changes
            on_host = given.device.type == "cpu"
            return cls(type(None), arrays.digest_of(given) if on_host else object())
        return cls(weakref.ref(given), version)

    def is_same(self, other: _Mark) -> bool:
        return self.version == other.version and self.reference() is other.reference()


_known: list[_Batch] = []  # the batches that were recorded last


def _find(batch: _Batch) -> dict[str, str] | None:
    """Return the tags of a known batch that is the same."""
    for other in reversed(_known):
        is_here = other.counters is batch.counters  # equal if empty
        same = is_here and other[1:4] == batch[1:4]
        if same and all(map(_Mark.is_same, other.marks, batch.marks)):
            tags: dict[str, str] = other.tags
            return tags
    return None


def catch_tokens(
    value: Any, tokens: Any, positions: Any, mask: Any, cu_seqlens: Any, sequence: Any
) -> dict[str, str]:
    """Record the tokens of a value's rows, once per batch; return the tags of the value."""
    cls, _, shape = arrays.describe(value)
    tokens = _as_array("tokens", tokens)
    rows_of(shape, shape_of("tokens", tokens), cls)
    return record_tokens(tokens, positions, mask, cu_seqlens, sequence)


def record_tokens(
    tokens: Any, positions: Any, mask: Any, cu_seqlens: Any, sequence: Any
) -> dict[str, str]:
    """Record the tokens of a batch unless a recent record is about the same; return its tag."""
    tokens = _as_array("tokens", tokens)
    shape = shape_of("tokens", tokens)
    parts: dict[str, Any] = {"tokens": tokens}
    for name, given in (("positions", positions), ("mask", mask), ("cu_seqlens", cu_seqlens)):
        if given is not None:
            parts[name] = _checked(name, _as_array(name, given), shape)
    names = _sequences(sequence)
    marks = tuple(map(_Mark.of, (tokens, positions, mask, cu_seqlens)))
    run = pipeline.counters, pipeline.queues
    batch = _Batch(*run, names, pipeline.clock.step, marks, {})
    tags = _find(batch)
    if tags is None:
        value = {**parts, "sequence": list(names)} if names else parts
        own = {} if batch.step is None else {STEPPED: "1"}
        seq = record_value(TOKENS, value, "builtins.dict", batch.step or 0, 0, own)
        tags = {TOKENS: str(seq)}
        _known.append(batch._replace(tags=tags))
        del _known[:-_RECENT]
    return tags


def record_value(
    name: str, value: Any, cls: str, step: int, call: int, tags: dict[str, str]
) -> int:
    """Record a snapshot of a value; return its number in the order of capture."""
    start = time.perf_counter_ns()
    snapshot: Any
    snapshot, nbytes = arrays.snapshot(value, pipeline.pool)
    dtype, shape = getattr(snapshot, "dtype", ""), getattr(snapshot, "shape", ())
    seq, place = pipeline.next_seq(), ranks.rank_and_world_size()
    record = Record(
        name, Kind.VALUE, step, call, seq, *place, time.time_ns(), cls, dtype, shape,
        value=snapshot, tags=tags,
    )  # fmt: skip
    pipeline.put_captured(record, nbytes, start)
    return seq


def _as_array(name: str, given: Any) -> Any:
    """Return ids as an array or a tensor; lists of numbers become one."""
    if isinstance(given, (list, tuple)):
        import numpy as np

        try:
            given = np.array(given, np.int64)
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be ids of equal rows, got {given!r:.80}") from None
    if not hasattr(given, "shape") or not hasattr(given, "dtype"):
        raise TypeError(f"{name} must be an array of integers, got {type(given).__name__}")
    return given


def shape_of(name: str, given: Any) -> tuple[int, ...]:
    """Return the shape of ids, which are one sequence or a batch of them."""
    _, dtype, shape = arrays.describe(given)
    if not dtype.startswith(_INTEGER) or not 1 <= len(shape) <= 2:
        raise TypeError(
            f"{name} must be integers of one or two dimensions, got {dtype} of shape {shape}"
        )
    return shape


def _checked(name: str, given: Any, shape: tuple[int, ...]) -> Any:
    """Return a description of tokens; raise if it does not fit them."""
    _, dtype, own = arrays.describe(given)
    if name == "cu_seqlens":
        if len(own) != 1 or not dtype.startswith(_INTEGER) or len([n for n in shape if n > 1]) > 1:
            raise TypeError(
                f"cu_seqlens must be offsets into tokens of one row, got {dtype} of shape {own} "
                f"for tokens of shape {shape}"
            )
    elif not dtype.startswith((*_INTEGER, "bool")) or own not in (
        shape,
        shape[1:],
        (1, *shape[1:]),
    ):
        raise ValueError(f"{name} must have the shape {shape} of tokens, got {dtype} {own}")
    return given


def _sequences(sequence: Any) -> tuple[str, ...]:
    if sequence is None:
        return ()
    if isinstance(sequence, (str, int)):
        return (str(sequence),)
    if isinstance(sequence, Sequence) and all(isinstance(n, (str, int)) for n in sequence):
        return tuple(map(str, sequence))
    raise TypeError(f"sequence must be a name, or a list with one per row, got {sequence!r:.80}")


def rows_of(shape: tuple[int, ...], tokens: tuple[int, ...], cls: str = "") -> tuple[int, int]:
    """Return how many leading dimensions of a value are its rows, and of how many tokens per row.

    A value with fewer columns than tokens is about the last ones.

    >>> rows_of((2, 7, 64), (2, 7)), rows_of((14, 8), (2, 7)), rows_of((2, 3), (2, 7))
    ((2, 7), (1, 7), (2, 3))
    """
    batch, length = (1, *tokens)[-2:]
    if shape[:2] == (batch, length) and len(shape) > 1:
        return 2, length
    if shape[:1] == (batch * length,):
        return 1, length
    if len(shape) > 1 and shape[0] == batch and shape[1] <= length:
        return 2, shape[1]
    if batch == 1 and shape and shape[0] <= length:
        return 1, shape[0]
    raise CaptureError(f"{cls or 'a value'} of shape {shape} has no row per token of {tokens}")
