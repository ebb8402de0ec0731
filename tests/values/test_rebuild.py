import contextlib
import dataclasses
import sys
import types
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortap.core.errors import WireError
from tensortap.core.record import Blob, Fields, Items, Mapping, Number, Opaque, TensorData
from tensortap.values import rebuild, snapshot
from tensortap.values.rebuild import find_class


class Point(typing.NamedTuple):
    x: int
    y: int

    @classmethod
    def __init_subclass__(cls):
        raise AssertionError


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: int = 2

    def __post_init__(self):
        Frozen.made += 1


Frozen.made = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: int


@dataclasses.dataclass
class Strict:
    a: int

    def __setattr__(self, name, value):
        if name == "a" and sys._getframe(1).f_code.co_name != "__init__":
            raise AssertionError("user code ran")
        object.__setattr__(self, name, value)


@dataclasses.dataclass
class Deletes:
    path: str

    def __del__(self):
        Deletes.ran.append(self.path)


Deletes.ran = []


@dataclasses.dataclass
class Guarded:
    a: int


# a field behind a data descriptor: setting it would run the descriptor
Guarded.a = property(lambda self: 0, lambda self, value: Guarded.ran.append(value))
Guarded.ran = []


@dataclasses.dataclass
class Err(Exception):
    a: int


def test_rebuilds_namedtuples_and_dataclasses(pool):
    values = [Point(1, 2), Frozen(1), Slotted(1, 2), Strict(3)]
    made = Frozen.made
    backs = rebuild(snapshot(values, pool)[0])
    assert backs == values
    assert [type(b) for b in backs] == [Point, Frozen, Slotted, Strict]
    assert Frozen.made == made


@pytest.mark.parametrize(
    "cls", [Deletes, Guarded, Err], ids=["finalizer", "descriptor", "not a plain object"]
)
def test_does_not_use_classes_whose_code_would_run(cls):
    name = dataclasses.fields(cls)[0].name
    back = rebuild(Fields("dataclass", f"{__name__}:{cls.__name__}", (name,), ("/home",)))
    assert type(back) is not cls
    assert type(back).__name__ == cls.__name__
    assert getattr(back, name) == "/home"
    del back
    assert getattr(cls, "ran", []) == []


@pytest.mark.parametrize(
    "path",
    [
        "nowhere:Point", "builtins:int", "os:system", "sys:modules", f"{__name__}:Point",
        f"{__name__}:Frozen", f"{__name__}:nothing", "builtins:tuple", ":", "os.path:join",
        f"{__name__}:Frozen.made", "a:b:c",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
def test_makes_classes_that_are_not_imported(kind, path):
    back = rebuild(Fields(kind, path, ("u", "v"), (1, Items("list", (2,)))))
    assert (back.u, back.v) == (1, [2])
    assert type(back).__module__ != "builtins"


def test_made_classes_have_the_name_and_compare():
    node = Fields("dataclass", "elsewhere:Model.State", ("step",), (1,))
    assert repr(rebuild(node)) == "State(step=1)"
    assert rebuild(Mapping(((node, 5),))) == {rebuild(node): 5}
    pair = Fields("namedtuple", "elsewhere:Pair", ("a", "b"), (1, 2))
    assert repr(rebuild(pair)) == "Pair(a=1, b=2)"


def test_finding_a_class_runs_no_code(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(name)

    module = types.ModuleType("lazy_getattr")
    module.__dict__["__getattr__"] = lambda name: 1 / 0
    monkeypatch.setitem(sys.modules, "lazy_getattr", module)
    monkeypatch.setitem(sys.modules, "lazy_all", Lazy("lazy_all"))
    monkeypatch.setitem(sys.modules, "not_a_module", Point(1, 2))
    for name in ("lazy_getattr", "lazy_all", "not_a_module", "never_imported"):
        assert find_class(f"{name}:Anything") is None
    assert "never_imported" not in sys.modules
    assert find_class(f"{__name__}:Point") is Point


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
