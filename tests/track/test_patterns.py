"""Selection of names by patterns."""

import re

import pytest

from tensortap.core.record import Kind
from tensortap.rooms.track.options import Patterns


@pytest.mark.parametrize(
    ("include", "exclude", "wanted"),
    [
        (None, None, "abc"),
        ("b", None, "b"),
        (None, "b", "ac"),
        ("a|b", "b", "a"),
        (re.compile("B", re.IGNORECASE), None, "b"),
        ({"weights": "c"}, None, "c"),
        ({"gradients": "c"}, None, "abc"),
        ({"Weight": "c"}, {"weights": "c"}, ""),
    ],
)
def test_patterns(include, exclude, wanted):
    patterns = Patterns(include, exclude)
    for _ in range(2):  # the second time from the cache
        assert "".join(n for n in "abc" if patterns.wants(Kind.WEIGHT, n)) == wanted


@pytest.mark.parametrize("kind", ["optimizer_state", "optimiser_state", "Optimiser_State"])
def test_kinds_have_two_spellings(kind):
    assert not Patterns({kind: "x"}).wants(Kind.OPTIMISER_STATE, "y")


def test_rejects_invalid_patterns_and_kinds():
    with pytest.raises(ValueError, match=r"exclude.*regular expression"):
        Patterns(exclude="(")
    with pytest.raises(ValueError, match=r"weight_gradient"):
        Patterns({"weightgrads": "x"})
    with pytest.raises(ValueError, match="include"):
        Patterns(include=5)
