"""One tensor, put together from what ranks recorded: ``get(name, rank="whole")``."""

import numpy as np
import pytest

from tensortap.api.lookup import Values
from tensortap.core.errors import NotFound
from tensortap.core.history import History
from tensortap.core.record import Kind, Record, Shard, TensorData

_WHOLE = np.arange(12, dtype="float32").reshape(6, 2)


def part(rank, array, offset=None, step=0, seq=0):
    data = TensorData("numpy", "float32", array.shape, array.tobytes())
    shard = None if offset is None else Shard(_WHOLE.shape, (offset, 0), ("S(0)",))
    return Record(
        "w", Kind.WEIGHT, step, 0, seq, rank, 3, 0, "", "float32", array.shape, shard, None, data
    )


def values(*records):
    history = History(1 << 20)
    history.write(records)
    return Values(history)


def test_shards_are_put_together_at_the_last_complete_step():
    shards = [part(rank, _WHOLE[2 * rank :][:2], 2 * rank) for rank in (0, 1, 2)]
    later = [part(rank, -_WHOLE[2 * rank :][:2], 2 * rank, step=1, seq=1) for rank in (0, 1, 2)]
    ahead = part(1, _WHOLE[:2], 2, step=2, seq=2)
    found = values(*shards, *later, ahead)
    np.testing.assert_array_equal(found.get("w", rank="whole"), -_WHOLE)
    np.testing.assert_array_equal(found.get("w", 1, rank="whole"), _WHOLE)
    np.testing.assert_array_equal(found.get("w", step=0, rank="whole"), _WHOLE)


def test_equal_replicas_are_one():
    found = values(*(part(rank, _WHOLE) for rank in (0, 1)))
    np.testing.assert_array_equal(found.get("w", rank="whole"), _WHOLE)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([part(0, _WHOLE), part(1, -_WHOLE)], "replicas of ranks 0 and 1 differ"),
        ([part(0, _WHOLE[:2], 0), part(2, _WHOLE[4:], 4)], "4 of 12 elements are in no shard"),
    ],
)
def test_parts_that_make_no_whole(records, message):
    with pytest.raises(NotFound, match=message):
        values(*records).get("w", rank="whole")


def test_index_out_of_range():
    with pytest.raises(NotFound, match="recorded at 1 steps: index 1 is out of range"):
        values(part(0, _WHOLE)).get("w", 1, rank="whole")
