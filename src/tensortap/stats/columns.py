"""Statistics of many tensors as columns, and the records that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tensortap.core.record import Record, Summary

Memory = tuple[int, int, Any, tuple[int, ...] | None]
"""The array of a tensor: its address, the kernel's code of its dtype, shape, strides in bytes."""


class SummaryColumns(NamedTuple):
    """Summaries as columns, each in the memory layout of an Arrow column."""

    counts: bytes  # five columns of int64
    figures: bytes  # ten columns of float64
    first_bins: bytes  # int32
    ends: bytes  # int32: where the bins of each begin, and where all end
    bins: bytes  # int64

    def summaries(self) -> list[Summary]:
        """Return the summaries one by one."""
        ends, bins = _numbers(self.ends, "i4"), _numbers(self.bins, "i8")
        return [
            Summary(*[*counts, *figures, first, tuple(bins[start:end])])
            for counts, figures, first, start, end in zip(
                _numbers(self.counts, "i8", 5), _numbers(self.figures, "f8", 10),
                _numbers(self.first_bins, "i4"), ends[:-1], ends[1:], strict=True,
            )
        ]  # fmt: skip


def _numbers(columns: bytes, dtype: str, count: int = 0) -> Any:
    """Return the numbers of a column, or the rows of `count` columns."""
    import numpy as np  # late: importing tensortap must not load it

    found = np.frombuffer(columns, dtype)
    return (found.reshape(count, -1).T if count else found).tolist()


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records of tensors that were summarized together, or of `numbers`: float64, as their values.

    `heads` are the records without what differs from step to step. While the tensors stay the same,
    so does this tuple, by identity.
    """

    heads: tuple[Record, ...]
    step: int
    seqs: Sequence[int]
    rank: int
    world_size: int
    time_ns: Sequence[int]
    stats: SummaryColumns | None
    numbers: bytes = b""

    def records(self) -> list[Record]:
        """Return the records one by one."""
        if self.stats is None:
            field, own = "value", _numbers(self.numbers, "f8")
        else:
            field, own = "stats", self.stats.summaries()
        replace, found = msgspec.structs.replace, zip(
            self.heads, self.seqs, self.time_ns, own, strict=True
        )  # fmt: skip
        same = {name: getattr(self, name) for name in ("step", "rank", "world_size")}
        return [
            replace(head, seq=seq, time_ns=time_ns, **{field: each}, **same)
            for head, seq, time_ns, each in found
        ]
