import enum
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.core.buffers import Pool
from tensortap.core.record import Opaque
from tensortap.values import describe, nbytes_of, rebuild, snapshot

POOL = Pool()
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers()
    | st.text() | st.binary() | st.binary().map(bytearray)
)  # fmt: skip


@given(SCALARS)
def test_round_trip_of_plain_values(value):
    node, nbytes = snapshot(value, POOL)
    back = rebuild(node)
    assert type(back) is type(value)
    assert back == value or repr(back) == repr(value)
    assert nbytes == nbytes_of(value)


def test_floats_keep_their_bits():
    value = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000ABC))[0]
    assert struct.pack("<d", rebuild(snapshot(value, POOL)[0])) == struct.pack("<d", value)


@pytest.mark.parametrize(
    "value", [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**6000, -(10**6000)], ids=hash
)
def test_ints_of_any_size(value):
    assert rebuild(snapshot(value, POOL)[0]) == value


def test_copies_bytearrays(pool):
    value = bytearray(b"abc")
    node, _ = snapshot(value, pool)
    value[0] = 0
    mine = rebuild(node)
    mine[1] = 0
    assert rebuild(node) == b"abc"


class Loud(str):
    __slots__ = ()

    def __str__(self):
        raise AssertionError

    __len__ = __iter__ = encode = __str__


class Half(float):
    __slots__ = ()

    def __float__(self):
        raise AssertionError


class Color(enum.IntEnum):
    RED = 1


def test_subclasses_are_rebuilt_as_plain_values(pool):
    for value, plain in ((Loud("añ"), "añ"), (Half(1.5), 1.5)):
        node, nbytes = snapshot(value, pool)
        assert type(rebuild(node)) is type(plain)
        assert rebuild(node) == plain
        assert nbytes == nbytes_of(value) == nbytes_of(plain)


def test_enums_keep_their_names(pool):
    assert snapshot(Color.RED, pool)[0].repr == "<Color.RED: 1>"


class Mute:
    def __repr__(self):
        raise RuntimeError("no")


class Broken:
    def __repr__(self):
        return "\ud800" + "x" * 10_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Mute(), "<repr raised RuntimeError>"),
        (Broken(), "\\ud800" + "x" * 494),
        (range(3), "range(0, 3)"),
    ],
)
def test_other_objects_keep_type_and_repr(value, text, pool):
    node, nbytes = snapshot(value, pool)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    assert node == Opaque(name, text)
    assert (nbytes, nbytes_of(value)) == (0, 0)
    assert rebuild(node) == node
    assert describe(value) == (name, "", ())


def test_invalid_text_keeps_its_repr(pool):
    assert snapshot("a\ud800", pool) == (Opaque("builtins.str", "'a\\ud800'"), 0)
    assert nbytes_of("a\ud800") == 0
