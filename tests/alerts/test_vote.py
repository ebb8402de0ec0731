"""Votes on replicas."""

import numpy as np
import pytest

from tensortap.alerts.vote import BatchVote, GroupDigests, ReplicaLayout, ReplicaVote
from tensortap.record import Kind
from tensortap.stats.shard_digest import shard_digest, sums_of


class Ranks:
    """Ranks with the same tensors, and the vote on them."""

    def __init__(self, count, certain=True, names=("fc.weight", "fc.bias")):
        self.values = [{n: np.zeros((2, 3), np.float32) for n in names} for _ in range(count)]
        layout = [
            ReplicaLayout(n, Kind.WEIGHT, "fc", "float32", (2, 3), None, certain) for n in names
        ]
        self.layouts = {"one": layout}
        self.ranks = tuple(range(count))
        self.vote = ReplicaVote(self.ranks)
        self.step = 0

    def compare(self, left_out=()):
        self.step += 10
        sent = {
            rank: GroupDigests(
                self.ranks, "one", b"".join(sums_of(shard_digest(v)) for v in values.values())
            )
            for rank, values in enumerate(self.values)
            if rank not in left_out
        }
        found = self.vote.compare(self.step, sent, self.layouts)
        return [(alert.rank, alert.message) for alert in found]


def test_the_outvoted_rank_is_named_once():
    ranks = Ranks(8)
    assert ranks.compare() == []
    weight = ranks.values[5]["fc.weight"]
    weight.view(np.uint32)[1, 2] ^= 1 << 27
    message = "rank 5 has another fc.weight than the other 7 since step 20; "
    detail = "1 of 6 elements differs: bit 27 of element [1, 2]"
    assert ranks.compare() == [(5, message + detail)]
    assert ranks.compare() == []  # as before
    weight[:] = 0
    assert ranks.compare() == []
    weight[0] = 7
    detail = "several of 6 elements differ"
    assert ranks.compare() == [(5, message.replace("20", "50") + detail)]


def test_several_ranks_and_no_majority():
    ranks = Ranks(5)
    for rank in (0, 3):
        ranks.values[rank]["fc.bias"][0, 0] = 1.5
    start = "ranks 0, 3 have another fc.bias than the other 3 since step 10; 1 of 6 elements"
    ((rank, message),) = ranks.compare()
    assert (rank, message.startswith(start)) == (0, True)
    # rank 4 is late: two against two
    ((rank, message),) = Ranks.compare(_split(), left_out=(4,))
    assert message.startswith("fc.bias differs between ranks 0, 3 and ranks 1, 2 since step 10, w")


def _split():
    ranks = Ranks(5)
    for rank in (0, 3):
        ranks.values[rank]["fc.bias"][0, 0] = 1.5
    return ranks


@pytest.mark.parametrize("certain", [True, False])
def test_what_differs_from_the_beginning(certain):
    ranks = Ranks(3, certain)
    ranks.values[1]["fc.weight"][:] = 1
    assert len(ranks.compare()) == certain
    ranks.values[1]["fc.bias"][:] = 1  # of the same module
    assert len(ranks.compare()) == certain


def test_what_was_equal_at_first_is_a_replica():
    ranks = Ranks(3, certain=False)
    assert ranks.compare() == []
    ranks.values[1]["fc.weight"][:] = 1
    assert len(ranks.compare()) == 1


def test_a_rank_that_has_diverged_in_everything_is_no_flood():
    ranks = Ranks(4, names=[f"fc.{i}" for i in range(100)])
    for value in ranks.values[2].values():
        value[:] = 1
    found = ranks.compare()
    assert len(found) == 8
    assert found[-1][1].endswith("; so do 92 more tensors")


def test_ranks_with_the_same_batches():
    vote = BatchVote((0, 1, 2, 3))
    layouts = {"one": [ReplicaLayout("input[0]", Kind.VALUE, "", "float32", (2,), None, True)]}

    def checks(*batches):
        found = []
        for step, each in enumerate(batches):
            sent = {
                rank: GroupDigests(vote.ranks, "one", batch.encode(), True)
                for rank, batch in enumerate(each)
            }
            found += [
                (step, a.message.split(" have")[0]) for a in vote.compare(step, sent, layouts)
            ]
        return found

    assert checks("abcd", "aaaa", "bbbb", "cccc", "dddd") == [(3, "all 4 ranks")]
    assert checks("abcd", "aabb", "ccde", "ffgg") == [(3, "ranks 0, 1")]
    assert checks("abcd", "aaaa", "aaaa", "aaaa", "aaaa") == []  # to fit the model to one batch
    assert checks("abcd", "aacd", "bbcd", "cade") == []
    assert checks("abcd", "aabc", "bcdd", "efaa") == []  # by accident: other ranks each time
