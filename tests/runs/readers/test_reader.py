"""The search for records, and the history as a reader."""

from __future__ import annotations

import pytest

from tensortap.core.errors import NotFound
from tensortap.core.history import History
from tensortap.core.record import Kind
from tensortap.runs.reader import find, find_all
from tests.runs.readers.contract import RECORDS, ReaderContract, record


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


def test_nothing_captured_yet():
    with pytest.raises(NotFound, match=r"^no 'x': nothing has been captured yet$"):
        find(History(1 << 20), "x")


def test_suggests_at_most_three_names():
    reader = history_of(*[record(i, f"layer{i}", i) for i in range(9)])
    with pytest.raises(NotFound) as caught:
        find(reader, "layer")
    assert str(caught.value).count(" or ") == 2


def test_suggests_long_name_by_a_part():
    reader = history_of(record(0, "model.decoder.blocks.11.attention.output.dense.weight", 0))
    with pytest.raises(NotFound, match=r"did you mean 'model\.decoder"):
        find(reader, "dense")


def test_error_shortens_list_of_ranks():
    reader = history_of(*[record(i, "x", i, rank=i) for i in range(100)])
    with pytest.raises(NotFound) as caught:
        find(reader, "x")
    assert str(caught.value) == (
        "'x' is on ranks 0, 1, 2, 3, 4, 5, 6, 7 … 99: pass rank=0 or rank='all'"
    )


def test_error_quotes_names():
    reader = history_of(record(0, "\x1b[2Jevil", 0))
    with pytest.raises(NotFound) as caught:
        find(reader, "evil")
    assert str(caught.value).isprintable()


def test_unknown_kind():
    with pytest.raises(NotFound, match="unknown kind 'Weights'; the kinds are Value, Activation"):
        find_all(history_of(*RECORDS), "loss", kind="Weights")


def test_not_found_is_a_lookup_error():
    with pytest.raises(LookupError):
        find(history_of(*RECORDS), "nobody", kind=Kind.VALUE)
