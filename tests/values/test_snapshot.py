import collections
import dataclasses
import typing

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensortap.core.buffers import Pool
from tensortap.core.errors import CaptureError
from tensortap.core.record import Fields, Items, Mapping, Value
from tensortap.values import nbytes_of, rebuild, snapshot
from tensortap.values.adapters import CACHED

POOL = Pool()


class Point(typing.NamedTuple):
    x: object
    y: object = 0


@dataclasses.dataclass
class State:
    step: int
    weights: object
    late: int = dataclasses.field(init=False)


KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = KEYS | st.tuples(KEYS, KEYS) | st.frozensets(KEYS, max_size=3)
TREES = st.recursive(
    KEYS | st.binary(),
    lambda parts: (
        st.lists(parts) | st.tuples(parts, parts) | st.dictionaries(KEYS, parts)
        | st.sets(KEYS) | st.builds(Point, parts, parts)
    ),
    max_leaves=20,
)  # fmt: skip


@pytest.mark.slow
@given(TREES)
def test_round_trip_of_any_tree(value):
    node, nbytes = snapshot(value, POOL)
    back = rebuild(node)
    assert back == value
    assert repr_of_types(back) == repr_of_types(value)
    assert nbytes == nbytes_of(value)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(node), type=Value) == node


def repr_of_types(value):
    if isinstance(value, dict):
        return {k: repr_of_types(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [repr_of_types(v) for v in value]
    return type(value)


def test_copies_tensors_in_containers(pool):
    value = {"w": torch.zeros(3), "rest": [np.zeros(50_000), Point(torch.zeros(5), 1)]}
    node, nbytes = snapshot(value, pool)
    value["w"].add_(1)
    value["rest"][0] += 1
    value["rest"][1].x.add_(1)
    value["rest"].clear()
    rebuild(node)["rest"].clear()
    back = rebuild(node)
    assert not back["w"].any()
    assert not back["rest"][0].any()
    assert not back["rest"][1].x.any()
    assert nbytes == 1 + 12 + 4 + 400_000 + 20 + 8


def test_leaves_out_unset_fields(pool):
    node, _ = snapshot(State(1, None), pool)
    assert node == Fields("dataclass", f"{__name__}:State", ("step", "weights"), (1, None))


def test_subclasses_are_rebuilt_as_their_container(pool):
    ordered = collections.OrderedDict(b=1, a=2)
    assert rebuild(snapshot(ordered, pool)[0]) == {"b": 1, "a": 2}
    assert list(rebuild(snapshot(ordered, pool)[0])) == ["b", "a"]
    default = collections.defaultdict(list, a=[1])
    assert type(rebuild(snapshot(default, pool)[0])) is dict
    assert rebuild(snapshot(torch.Size([2, 3]), pool)[0]) == (2, 3)
    assert rebuild(snapshot(collections.deque([1, 2]), pool)[0]) == [1, 2]
    maximum = torch.max(torch.ones(2, 2), 0)
    assert rebuild(snapshot(maximum, pool)[0])[1].tolist() == [0, 0]


def test_dicts_that_are_dataclasses(pool):
    @dataclasses.dataclass
    class Output(collections.OrderedDict):
        loss: float

    output = Output(1.0)
    output["loss"] = 2.0
    assert snapshot(output, pool)[0] == Mapping((("loss", 2.0),))


def cycle():
    value = [1]
    value.append({"self": value})
    return value


def deep(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def test_rejects_cycles(pool):
    with pytest.raises(CaptureError, match=r"at \[1\]\['self'\]: it contains itself"):
        snapshot(cycle(), pool)
    assert nbytes_of(cycle()) == 12


def test_rejects_deep_nesting(pool):
    assert rebuild(snapshot(deep(100), pool)[0]) == deep(100)
    for depth in (101, 5000):
        with pytest.raises(CaptureError, match="deeper than 100"):
            snapshot(deep(depth), pool)
        assert nbytes_of(deep(depth)) == 0


def test_errors_say_where(pool):
    value = {"a": [0, State(1, torch.eye(2).to_sparse())]}
    with pytest.raises(CaptureError, match=r"^at \['a'\]\[1\]\.weights: .*to_dense"):
        snapshot(value, pool)

    class Key:
        def __repr__(self):
            raise RuntimeError

    with pytest.raises(CaptureError, match=r"^at \[<repr raised RuntimeError>\]"):
        snapshot({Key(): torch.eye(2).to_sparse()}, pool)


def test_bounds_the_cache_of_classes(pool):
    for number in range(5000):
        snapshot(type(f"C{number}", (list,), {})([1]), pool)
    assert len(CACHED) <= 4096
    assert snapshot([1.0], pool) == (Items("list", (1.0,)), 8)
