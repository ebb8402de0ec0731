import os
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from tensortap.core.buffers import Pool
from tensortap.core.record import Items
from tensortap.values import digest, digest_of, snapshot

POOL = Pool()


def values():
    torch.manual_seed(0)
    big = torch.randn(100, 100)
    return {
        "float": 1.5,
        "nan": float("nan"),
        "none": None,
        "bool": True,
        "int": -3,
        "huge": 1 << 80,
        "complex": 1 - 2j,
        "text": "añ",
        "bytes": b"ab",
        "scalar": torch.tensor(1.5),
        "torch": big,
        "strided": big.T,
        "sliced": big[::2, 3:],
        "bfloat16": big.bfloat16(),
        "parameter": torch.nn.Parameter(big),
        "conj": torch.complex(big, big).conj(),
        "numpy": big.numpy(),
        "fortran": np.asfortranarray(big.numpy()),
        "times": np.arange(5000).astype("M8[s]"),
        "numpy scalar": np.float32(3),
        "ml": big.numpy().astype(ml_dtypes.float8_e4m3fn),
        "jax": jnp.asarray(big.numpy()),
        "jax small": jnp.ones(3, jnp.bfloat16),
        "int4": jnp.ones(3, jnp.int4),
        "empty": torch.empty(0, 3),
        "dict": {"a": [1, big, (2,)], "b": {"x", "y", "z"}, 3: frozenset({1, 2})},
        "object": range(3),
        "size": torch.Size([2]),
    }


def test_values_and_their_snapshots_have_the_same_digest():
    for name, value in values().items():
        expected = digest(snapshot(value, POOL)[0])
        assert len(expected) == 16
        assert digest_of(value) == expected, name


def test_all_values_differ():
    found = values()
    for same in ("parameter", "numpy", "jax", "fortran"):
        assert digest_of(found.pop(same)) == digest_of(found["torch"])
    assert len({digest_of(v) for v in found.values()}) == len(found)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros(4, "f4"), np.zeros(4, "i4")),
        (np.zeros(4), np.zeros((2, 2))),
        (np.zeros(1), np.zeros(())),
        (np.float64(0.0), np.float64(-0.0)),
        (1, 1.0), (1, True), (0, None), ("1", 1), ("a", b"a"), (b"a", bytearray(b"a")),
        ([1, 2], (1, 2)), ([1, 2], [2, 1]), ({1}, frozenset({1})), ([[1], 2], [[1, 2]]),
        ([], {}), (["ab", "c"], ["a", "bc"]), ({"a": 1}, ["a", 1]), ([np.zeros(2)], [0.0, 0.0]),
    ],
)  # fmt: skip
def test_different_values_have_different_digests(a, b):
    assert digest_of(a) != digest_of(b)


def test_sets_do_not_depend_on_their_order():
    words = ["a", "b", "c", "d"]
    assert digest(Items("set", tuple(words))) == digest(Items("set", tuple(reversed(words))))
    code = (
        "from tensortap.values import digest_of;"
        "print(digest_of({'k': {'a', 'b', 'c', 'd', ('e', 1)}}).hex())"
    )
    found = set()
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        found.add(subprocess.check_output([sys.executable, "-c", code], env=env))
    assert len(found) == 1


def test_contiguous_memory_is_not_copied(monkeypatch):
    monkeypatch.setattr(Pool, "acquire", lambda *args: 1 / 0)
    array = np.zeros(10_000_000, np.uint8)
    seen = []
    module = sys.modules["tensortap.stats.digest"]
    view_of = module.view_of
    monkeypatch.setattr(module, "view_of", lambda data: seen.append(view_of(data)) or seen[-1])
    digest_of(array)
    digest_of(torch.from_numpy(array))
    addresses = [np.frombuffer(view, np.uint8).ctypes.data for view in seen]
    assert addresses == [array.ctypes.data] * 2
