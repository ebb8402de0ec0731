"""The tensors in what a module returns."""

import dataclasses
from collections import OrderedDict, namedtuple

import pytest

from tensortap.sources.outputs import leaves

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
def test_all_are_found_with_their_places(value, found):
    assert list(leaves(value, float)) == found


def test_what_holds_itself_ends():
    loop = [1.5]
    loop.append(loop)
    found = list(leaves(loop, float))
    assert found[0] == ("[0]", 1.5)
    assert len(found) < 50
