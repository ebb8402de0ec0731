"""Two ranks are asked for a tensor in which several elements differ."""

import numpy as np

from tensortap.alerts.vote import ReplicaLayout, UnequalTensor
from tensortap.record import Kind, Shard
from tensortap.sources.replica_values import ReplicaAnswers, ReplicaQuestions, copy_of


class Store(dict):
    """A store of all ranks, seen by one of them."""

    rank, ranks = 0, (0, 1, 2)

    def __init__(self, shared, rank):
        self.shared, self.rank = shared, rank

    def put(self, key, data):
        self.shared[key] = data

    def get(self, keys):
        return [self.shared[key] for key in keys] if set(keys) <= set(self.shared) else None

    def delete(self, key):
        self.shared.pop(key, None)


def asked(shard=None):
    shared = {}
    layout = ReplicaLayout("fc.weight", Kind.WEIGHT, "fc", "float32", (2, 3), shard, True)
    questions = ReplicaQuestions(Store(shared, 0))
    questions.ask(UnequalTensor(layout, 1, 2))
    ranks = [ReplicaAnswers(Store(shared, rank)) for rank in (1, 2)]
    for rank in ranks:
        rank.look()
        assert rank.wanted.name == "fc.weight"
    return shared, questions, ranks


def test_values_of_the_same_step_are_compared():
    shared, questions, ranks = asked(Shard((8, 3), (4, 0), ("S(0)",)))
    values = np.zeros((2, 3), np.float32), np.array([[0, 0, 0], [0, 1, 2]], np.float32)
    ranks[0].send(10, copy_of(values[0]))
    for step in (10, 20):
        questions.reach(step)
        assert questions.receive() is None
        ranks[1].send(20, copy_of(values[1]))
    ranks[0].send(20, copy_of(values[0]))
    alert = questions.receive()
    assert alert.message == (
        "2 of 6 elements differ between rank 1 and rank 2 at step 20, the first is [5, 1]"
    )
    assert alert.facts == {"differing": 2, "element": 16}
    assert not shared
    assert not questions.is_waiting
    ranks[1].look()
    assert ranks[1].wanted is None  # it has been withdrawn


def test_a_rank_answers_a_few_times_and_the_question_is_forgotten():
    shared, questions, ranks = asked()
    for step in range(32):
        ranks[0].send(step, copy_of(np.zeros((2, 3), np.float32)))
    assert ranks[0].wanted is None
    ranks[0].look()
    assert ranks[0].wanted is None  # it has been answered
    for step in range(65):
        questions.reach(step)
    assert not questions.is_waiting
    assert [key for key in shared if key.startswith("values/")] == []
