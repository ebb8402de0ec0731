"""Digests of one model are the same under every sharding, in every framework."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensortap as tap
from tensortap.core.errors import TensortapError
from tensortap.core.record import Shard
from tensortap.rooms.align import digest as module
from tensortap.rooms.align.rows import CASTS, added, concatenated, digest_rows, rows_and_length
from tensortap.rooms.track.shard_digest import block_matrices, key_table, seed_of
from tensortap.stats import summarize


def drawn(shape, dtype="float32", seed=0):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = np.random.default_rng(seed).standard_normal(shape)
    if dtype.kind == "u":
        return np.asarray(raw * 20 + 100).astype(dtype)
    sizes = np.random.default_rng(1).choice([1e-40, 1e-30, 1e-6, 1, 1e5, 1e30], shape)
    return np.asarray(raw * sizes).astype(dtype)


def by_definition(x, dtype):
    """Return the digest of a matrix as digest.c defines it, with Python's integers."""
    modulus = [0x9E3779B1, 0x7F4A7C16, 0xBF58476D, 0x94D049BA, 0x3C6EF372]
    pieces = np.ascontiguousarray(x).view(np.int16).astype(int)
    blocks = -(-pieces.shape[1] // len(key_table()))
    matrices = block_matrices(seed_of(dtype, ()), np.arange(blocks, dtype=np.uint64)).astype(object)
    keys = key_table().astype(object)
    total = [0] * 5
    for row in pieces[::-1]:
        total = [
            (b + total[4] * factor) for b, factor in zip([0, *total[:4]], modulus, strict=True)
        ]
        for block in range(blocks):
            part = row[block * len(keys) : (block + 1) * len(keys)]
            inner = (part[:, None] * keys[: len(part)]).sum(0)
            for i, each in enumerate(matrices[block] @ inner):
                total[i] += each
        total = [each % (1 << 32) for each in total]
    return tuple(total)


SHAPES = [(), (5,), (7, 3), (4, 3, 40), (3, 4, 3, 3), (2, 5000), (2, 3, 9000), (1, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "uint8", "complex128"])
def test_every_variant_agrees(dtype):
    casts = CASTS if dtype == "float32" else ()
    views = [drawn(shape, dtype) for shape in SHAPES]
    views += [views[2].T, views[3][::-1, ::2, 3:], views[5][:, ::7]]
    kernel = summarize.kernel
    found = []
    used = kernel.variant()
    try:
        for variant in kernel.variants():
            kernel.use(variant)
            found.append([digest_rows(view, dtype, None, casts) for view in views])
    finally:
        kernel.use(used)
    assert all(each == found[0] for each in found)
    assert len({each[0] for each in found[0]}) > len(SHAPES)
    assert [digest_rows(view, dtype, None, casts) for view in map(np.array, views)] == found[0]
    if dtype != "uint8":
        for i in (2, 5, 8, 10):
            assert found[0][i][0] == by_definition(views[i], dtype)


def test_casts_are_those_of_torch():
    import torch

    x = drawn((64, 1000))
    own, *casts = digest_rows(x, "float32", None, CASTS)
    for name, found in zip(CASTS, casts, strict=True):
        cast = torch.from_numpy(x).to(getattr(torch, name))
        assert found == digest_rows(cast.view(torch.int16).numpy(), name)[0]
        assert found != own


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_parts_make_up_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)))
    x = drawn(shape)
    cuts = [
        sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape
    ]
    parts = []
    for place in np.ndindex(*(len(cut) - 1 for cut in cuts)):
        at = [(cut[i], cut[i + 1]) for cut, i in zip(cuts, place, strict=True)]
        shard = Shard(shape, tuple(start for start, _ in at))
        parts.append(digest_rows(x[tuple(slice(*each) for each in at)], "float32", shard)[0])
    assert added(parts) == digest_rows(x, "float32")[0]
    count = data.draw(st.integers(0, shape[0]))
    halves = [x[:count], x[count:]]
    sums = [(digest_rows(half, "float32")[0], rows_and_length(half.shape)[0]) for half in halves]
    assert concatenated(sums) == digest_rows(x, "float32")[0]


def test_any_change_shows():
    x = drawn((64, 48), "float32")
    seen = {digest_rows(x, "float32")[0]}
    rng = np.random.default_rng(0)
    for _ in range(2000):
        y = x.copy()
        choice = rng.integers(4)
        i, j = rng.choice(64, 2, replace=False)
        column = rng.integers(48)
        if choice == 0:  # a bit
            y.view(np.uint32)[i, column] ^= 1 << rng.integers(32)
        elif choice == 1:  # two rows change places
            y[[i, j]] = y[[j, i]]
        elif choice == 2:  # two signs
            y[[i, j], column] *= -1
        else:  # a column is shifted
            y[:, column] = np.roll(y[:, column], int(i) + 1)
        if not np.array_equal(y.view(np.uint32), x.view(np.uint32)):
            assert digest_rows(y, "float32")[0] not in seen


def test_frameworks_and_containers_agree():
    import jax.numpy as jnp
    import torch

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    trees = [
        {"a": [x, {"b": x[0]}]},
        {"a": (jnp.asarray(x), {"b": jnp.asarray(x[0])})},
        {"a": [torch.from_numpy(x), {"b": torch.from_numpy(x[0])}]},
    ]
    digests = [tap.digest(tree) for tree in trees]
    assert list(digests[0].rows) == ["a.0", "a.1.b"]
    assert digests[0].rows == digests[1].rows == digests[2].rows
    assert "a.1.b" in repr(digests[0])


def test_large_tensors_are_digested_in_pieces(monkeypatch):
    x = drawn((300, 700))
    whole = tap.digest({"x": x, "y": x.reshape(3, 100, 700)}, transposed=True).rows
    monkeypatch.setattr(module, "_PIECE", 10_000)
    monkeypatch.setattr(module, "_FEW", 0)
    assert tap.digest({"x": x, "y": x.reshape(3, 100, 700)}, transposed=True).rows == whole
    assert whole["x"].digest == whole["y"].digest  # a stack is the concatenation


def test_wrong_arguments():
    with pytest.raises(TensortapError, match="model must hold tensors, got dict without any"):
        tap.digest({"a": 1})


def test_what_cannot_be_read_is_no_agreement():
    import torch

    x = torch.ones(3, device="meta")
    digest = tap.digest({"x": x, "y": torch.ones(2)})
    assert digest.rows["x"].unread
    (wrong,) = tap.compare(digest, digest).wrong
    assert (wrong.names, wrong.state) == (("x",), "unknown")


SHARDINGS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 7)
        self.experts = nn.Parameter(torch.randn(3, 5, 16))
    def forward(self, x):
        return self.down(self.norm(self.up(x)))

def made():
    torch.manual_seed(0)
    return Net()

def rows(model):
    found = tap.digest(model, transposed=True)
    return {name: [row.digest, row.casts, row.transposed, row.unread]
            for name, row in found.rows.items()}

def tp(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

def fsdp(model, mesh):
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model

line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
result = {"plain": rows(made())}
result["ddp"] = rows(nn.parallel.DistributedDataParallel(made()))
result["fsdp"] = rows(fsdp(made(), line))
result["hsdp"] = rows(fsdp(made(), grid))
result["tp"] = rows(tp(made(), line))
result["fsdp and tp"] = rows(fsdp(tp(made(), grid["tp"]), grid["dp"]))
model = made()
for module in model.modules():
    for name, parameter in list(module.named_parameters(recurse=False)):
        places = [Replicate(), Shard(parameter.ndim - 1)]
        setattr(module, name, nn.Parameter(distribute_tensor(parameter, grid, places)))
result["last dimension"] = rows(model)
if rank == world - 1:  # one bit in one shard
    model.experts.to_local().data.view(torch.int32)[1, 2, 0] ^= 1
wrong = rows(model)
result = {"equal": {key: each == result["plain"] for key, each in result.items()},
          "names": list(result["plain"]),
          "wrong": {name: wrong[name] for name in wrong if wrong[name] != result["plain"][name]}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_digests_do_not_depend_on_the_sharding(gloo, world):
    for found in gloo(SHARDINGS, world=world):
        assert all(found["equal"].values()), found["equal"]
        assert len(found["equal"]) == 7
        assert list(found["wrong"]) == ["experts"]
        assert found["wrong"]["experts"][3] == "its replicas differ"
        assert "norm.running_mean" in found["names"]


@pytest.mark.slow
def test_arrays_of_jax_on_several_devices(tmp_path, run_program):
    run_program(
        tmp_path,
        """
        import jax, jax.numpy as jnp, numpy as np, tensortap as tap
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
        w = np.arange(32, dtype=np.float32).reshape(4, 8)
        plain = tap.digest({"w": w}).rows
        for places in (P("x", "y"), P("y"), P(None, "x"), P()):
            array = jax.device_put(w, NamedSharding(mesh, places))
            assert len(array.sharding.device_set) == 4
            assert tap.digest({"w": array}).rows == plain, places
        """,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )
