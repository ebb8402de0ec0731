"""Blocks of small records on their way to a sink: their columns, and their records if need be."""

from __future__ import annotations

import math

from tensortap.columns import Column, Columns, merged, split
from tensortap.dtypes import itemsize
from tensortap.pipeline.fast import RecordBlock
from tensortap.pipeline.ledger import Entry
from tensortap.record import Kind


def columns_of(block: RecordBlock) -> tuple[Column, ...]:
    """Return what the records of each column have in common."""
    return tuple(
        [
            Column(name, Kind.VALUE, *rank, type_name, framework, dtype, shape)
            for name, type_name, framework, dtype, shape, rank in block.columns
        ]
    )


def _split(block: RecordBlock) -> list[Columns]:
    body = bytearray(block.nbytes)
    block.move(body)
    columns = columns_of(block)
    sizes = [
        8 if each.is_number else itemsize(each.dtype) * math.prod(each.shape) for each in columns
    ]
    return split(columns, sizes, len(block), body)


def entries_of(block: RecordBlock) -> list[Entry]:
    """Return the entries of a block with their records."""
    records = merged(_split(block))
    return [(record, *entry[1:]) for record, entry in zip(records, block.entries(), strict=True)]


def latest_of(block: RecordBlock) -> tuple[list[Entry], list[Entry]]:
    """Return the entries of the latest record of each column, and all others, without records."""
    latest = {
        int(each.positions[-1]): each.records(len(each) - 1, len(each))[0] for each in _split(block)
    }
    entries = block.entries()
    kept = [(latest[i], *entries[i][1:]) for i in sorted(latest)]
    return kept, [entry for i, entry in enumerate(entries) if i not in latest]
