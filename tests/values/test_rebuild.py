import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.core.errors import WireError
from tensortap.core.record import Blob, Fields, Items, Mapping, Number, Opaque, TensorData
from tensortap.values import rebuild


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: int = 2

    def __post_init__(self):
        raise AssertionError("code of the user ran")


@pytest.mark.parametrize(
    "path",
    [
        "nowhere:Point", "builtins:int", "os:system", f"{__name__}:Frozen", "builtins:tuple", ":",
        "a:b:c",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
def test_makes_classes_and_runs_none_of_the_user(kind, path):
    back = rebuild(Fields(kind, path, ("u", "v"), (1, Items("list", (2,)))))
    assert (back.u, back.v) == (1, [2])
    assert type(back).__module__ != "builtins"
    assert type(back) is not Frozen


def test_made_classes_have_the_name_and_compare():
    node = Fields("dataclass", "elsewhere:Model.State", ("step",), (1,))
    assert repr(rebuild(node)) == "State(step=1)"
    assert rebuild(Mapping(((node, 5),))) == {rebuild(node): 5}
    pair = Fields("namedtuple", "elsewhere:Pair", ("a", "b"), (1, 2))
    assert repr(rebuild(pair)) == "Pair(a=1, b=2)"


@pytest.mark.parametrize(
    "names",
    [
        ("a b",), ("a", "a"), ("class",), ("",), ("a=1",), ("__class__",), ("1a",), ("a\n",),
        ("x):\n import os\n def f(",), ("fi", "ﬁ"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
@pytest.mark.attack("hostile records")
def test_rejects_hostile_fields(kind, names):
    with pytest.raises(WireError, match="fields"):
        rebuild(Fields(kind, "a:B", names, tuple(range(len(names)))))


@pytest.mark.attack("hostile records")
def test_replaces_hostile_class_names():
    for name in ("a:x y", "a:__import__('os')", "a:class", "a:"):
        assert type(rebuild(Fields("dataclass", name, ("a",), (1,)))).__name__ == "Unnamed"


@pytest.mark.parametrize(
    "node",
    [
        Fields("namedtuple", "a:B", ("_a",), (1,)),
        Fields("class", "a:B", ("a",), (1,)),
        Items("deque", (1,)),
        Items("__import__", ()),
        Items("set", (Items("list", ()),)),
        Mapping(((Items("list", ()), 1),)),
        Mapping(((Mapping(()), 1),)),
        Number("int", text="__import__('os')"),
        Number("int", text="0x" + "_1"),
        Number("int", text=""),
        Number("complex", (1.0,)),
        Number("complex", (1.0, 2.0, 3.0)),
        Number("float", (1.0,)),
        TensorData("torch.nn", "int8", (1,), b"1"),
        TensorData("os", "int8", (1,), b"1"),
    ],
)  # fmt: skip
def test_rejects_invalid_nodes(node):
    with pytest.raises(WireError):
        rebuild(node)
    with pytest.raises(WireError):
        rebuild(Items("list", (1, node)))


def test_rejects_deep_nesting():
    node = 1
    for _ in range(101):
        node = Items("list", (node,))
    with pytest.raises(WireError, match="deeper"):
        rebuild(node)


NAMES = st.text(max_size=8) | st.sampled_from(["x", "y", "a", "b", "namedtuple", "dataclass"])
NODES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.builds(Opaque, NAMES, NAMES)
    | st.builds(Number, NAMES, st.lists(st.floats(), max_size=3).map(tuple), NAMES)
    | st.builds(Blob, NAMES, st.binary(max_size=5)),
    lambda parts: (
        st.builds(Items, st.sampled_from(["list", "tuple", "set", "frozenset", "x"]),
                  st.lists(parts, max_size=4).map(tuple))
        | st.builds(Mapping, st.lists(st.tuples(parts, parts), max_size=4).map(tuple))
        | st.builds(lambda kind, cls, fields: Fields(kind, cls, *zip(*fields, strict=True)),
                    NAMES, NAMES, st.lists(st.tuples(NAMES, parts), min_size=1, max_size=4))
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.slow
@given(NODES)
def test_rejects_any_invalid_node(node):
    with contextlib.suppress(WireError):
        rebuild(node)
