"""Finding records, and the reader that is the history itself."""

from __future__ import annotations

import pytest

from tensortap.errors import NotFound
from tensortap.history import History
from tensortap.readers.reader import find, find_all
from tensortap.record import Kind
from tests.readers.contract import RECORDS, ReaderContract, record


class TestHistory(ReaderContract):
    @pytest.fixture
    def reader(self):
        history = History(1 << 30)
        history.write(RECORDS)
        return history


def history_of(*records):
    history = History(1 << 30)
    history.write(records)
    return history


def test_nothing_yet():
    with pytest.raises(NotFound, match=r"^no 'x': nothing has been captured yet$"):
        find(History(1 << 20), "x")


def test_at_most_three_near_names():
    reader = history_of(*[record(i, f"layer{i}", i) for i in range(9)])
    with pytest.raises(NotFound) as caught:
        find(reader, "layer")
    assert str(caught.value).count(" or ") == 2


def test_part_of_a_long_name():
    reader = history_of(record(0, "model.decoder.blocks.11.attention.output.dense.weight", 0))
    with pytest.raises(NotFound, match=r"did you mean 'model\.decoder"):
        find(reader, "dense")


def test_many_ranks_are_not_all_listed():
    reader = history_of(*[record(i, "x", i, rank=i) for i in range(100)])
    with pytest.raises(NotFound) as caught:
        find(reader, "x")
    assert str(caught.value) == (
        "'x' is there of ranks 0, 1, 2, 3, 4, 5, 6, 7 … 99: say rank=0 or rank='all'"
    )


def test_names_of_strangers_are_quoted():
    reader = history_of(record(0, "\x1b[2Jevil", 0))
    with pytest.raises(NotFound) as caught:
        find(reader, "evil")
    assert str(caught.value).isprintable()


def test_a_kind_that_does_not_exist():
    with pytest.raises(NotFound, match="no kind is called 'Weights'; there is Value, Activation"):
        find_all(history_of(*RECORDS), "loss", kind="Weights")


def test_errors_are_lookup_errors_as_well():
    with pytest.raises(LookupError):
        find(history_of(*RECORDS), "nobody", kind=Kind.VALUE)
