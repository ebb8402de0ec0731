"""Tensors in the output of a module."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest

from tensortap.rooms.track.observing import tensors_in

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Both:
    a: object
    b: object = None


class ModelOutput(OrderedDict):
    """As in transformers: a dict and a dataclass in one."""


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1.5, [("", 1.5)]),
        ((1.5, None, "x", 3), [("[0]", 1.5)]),
        ([[1.5], (2.5,)], [("[0][0]", 1.5), ("[1][0]", 2.5)]),
        (Pair(1.5, [2.5]), [("[a]", 1.5), ("[b][0]", 2.5)]),
        (Both(1.5, Both(2.5)), [("[a]", 1.5), ("[b][a]", 2.5)]),
        (ModelOutput(loss=1.5, past=((2.5,),)), [("[loss]", 1.5), ("[past][0][0]", 2.5)]),
        ({3: 1.5}, [("[3]", 1.5)]),
        (Both, []),
        (object(), []),
        (None, []),
        (b"bytes", []),
    ],
)
def test_finds_tensors_with_their_paths(value, found):
    assert list(tensors_in(value, float)) == found


def test_ends_in_a_container_that_contains_itself():
    loop = [1.5]
    loop.append(loop)
    found = list(tensors_in(loop, float))
    assert found[0] == ("[0]", 1.5)
    assert len(found) < 50
