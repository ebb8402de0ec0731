"""The contract of all readers."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.core.errors import NotFound
from tensortap.core.record import Items, Kind, Record, TensorData
from tensortap.runs.reader import find, find_all
from tensortap.values import rebuild


def tensor(value) -> TensorData:
    array = np.asarray(value, dtype="float32")
    return TensorData("numpy", "float32", array.shape, array.tobytes())


def record(number, name, value, **fields) -> Record:
    fields = {"kind": Kind.VALUE, "step": number, "rank": 0, "world_size": 1, **fields}
    return Record(name=name, call=0, seq=number, time_ns=1_000 + number, value=value, **fields)


RECORDS = [
    record(0, "loss", 1.5, step=10),
    record(1, "weights", tensor([[1, 2], [3, 4]]), dtype="float32", shape=(2, 2)),
    record(2, "loss", 1.25, step=20),
    record(3, "grads", tensor([1]), rank=0, world_size=2),
    record(4, "grads", tensor([2]), rank=1, world_size=2),
    record(5, "both", 1, kind=Kind.ACTIVATION),
    record(6, "both", 2, kind=Kind.GRADIENT),
    record(7, "tree", Items("list", (tensor([5]), "text", None))),
    record(8, "loss", 1.0, step=40),
    record(9, "größe", "ä" * 1000),
    record(10, "large", tensor(np.arange(1_000_000))),
    record(11, "nothing", None),
]


class ReaderContract:
    """Subclasses provide the fixture `reader`, which holds RECORDS."""

    @pytest.fixture
    def reader(self):
        raise NotImplementedError

    def test_names_are_in_order_of_their_first_record(self, reader):
        expected = ["loss", "weights", "grads", "both", "tree", "größe", "large", "nothing"]
        assert reader.names() == expected

    def test_records_are_sorted_oldest_first(self, reader):
        assert [r.step for r in reader.records("loss")] == [10, 20, 40]
        assert [r.seq for r in reader.records("grads")] == [3, 4]

    def test_records_have_everything_but_their_value(self, reader):
        (found,) = reader.records("weights")
        expected = RECORDS[1]
        for field in Record.__struct_fields__:
            if field != "value":
                assert getattr(found, field) == getattr(expected, field)

    @pytest.mark.parametrize("expected", RECORDS, ids=lambda r: r.name)
    def test_loads_every_value(self, reader, expected):
        found = [r for r in reader.records(expected.name) if r.seq == expected.seq]
        assert len(found) == 1
        assert reader.load(found[0]) == expected

    def test_loaded_value_belongs_to_the_caller(self, reader):
        taken = rebuild(reader.load(find(reader, "weights")).value)
        taken[:] = 0
        again = rebuild(reader.load(find(reader, "weights")).value)
        assert again.tolist() == [[1, 2], [3, 4]]

    def test_unknown_name_has_no_records(self, reader):
        assert reader.records("nobody") == []

    def test_filters(self, reader):
        seqs = lambda **wanted: [r.seq for r in reader.records(wanted.pop("name"), **wanted)]
        assert seqs(name="loss", step=20) == [2]
        assert seqs(name="loss", step=30) == []
        assert seqs(name="grads", rank=1) == [4]
        assert seqs(name="both", kind=Kind.GRADIENT) == [6]
        assert seqs(name="loss", last=1)[-1:] == [8]
        assert seqs(name="loss", last=2)[-2:] == [2, 8]

    def test_find(self, reader):
        assert find(reader, "loss").step == 40
        assert find(reader, "loss", 1).step == 20
        assert find(reader, "loss", -1).step == 10
        assert find(reader, "loss", step=10).seq == 0
        assert find(reader, "grads", rank=1).seq == 4
        assert find(reader, "both", kind="Gradient").seq == 6
        assert len(find_all(reader, "grads")) == 2
        assert len(find_all(reader, "grads", rank="all")) == 2

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("lose",), "no 'lose'; did you mean 'loss'?"),
            (("weight",), "no 'weight'; did you mean 'weights'?"),
            (("qqqqqq",), "no 'qqqqqq'; there are 8 names, the first is 'loss'"),
        ],
    )
    def test_suggests_similar_names(self, reader, arguments, words):
        with pytest.raises(NotFound) as caught:
            find(reader, *arguments)
        assert str(caught.value) == words

    @pytest.mark.parametrize(
        ("name", "wanted", "words"),
        [
            (
                "loss",
                {"step": 30},
                "no 'loss' at step 30; the nearest captured steps are 20 and 40",
            ),
            ("loss", {"step": 99}, "no 'loss' at step 99; the nearest captured step is 40"),
            ("loss", {"step": -1}, "no 'loss' at step -1; the nearest captured step is 10"),
            ("loss", {"rank": 3}, "no 'loss' on rank 3; it is on rank 0"),
            ("grads", {"rank": 3}, "no 'grads' on rank 3; it is on ranks 0 and 1"),
            ("grads", {}, "'grads' is on ranks 0 and 1: pass rank=0 or rank='all'"),
            (
                "both",
                {"kind": "Weight"},
                "no Weight of 'both'; it exists as Activation and Gradient",
            ),
            ("both", {}, "'both' exists as Activation and Gradient: pass kind='Activation'"),
            ("loss", {"index": 3}, "'loss' has 3 records: index 3 is out of range"),
            ("loss", {"index": -4}, "'loss' has 3 records: index -4 is out of range"),
        ],
    )
    def test_error_says_what_exists(self, reader, name, wanted, words):
        with pytest.raises(NotFound) as caught:
            find(reader, name, **wanted)
        assert str(caught.value) == words
