"""What every framework promises: `TestTorch(FrameworkContract)` and its like check it."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest

import tensortap as tap
from tensortap.core.buffers import Pool, view_of
from tensortap.core.dtypes import DTYPES, itemsize, numpy_dtype
from tensortap.core.errors import WireError
from tensortap.core.record import TensorData
from tensortap.runs.object_files import load_file
from tensortap.stats import summarize_array
from tensortap.values import describe, digest, digest_of, nbytes_of, rebuild, snapshot, summary_of
from tensortap.values.adapters import adapter_of
from tensortap.values.protocol import SMALL
from tensortap.values.registry import framework_named, loaded_frameworks
from tensortap.values.view import as_numpy

SHAPES = [(), (0, 3), (3, 4, 5), (40, 30, 25)]
POOL = Pool()


def any_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array in which every bit pattern of the dtype may occur."""
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, int(np.prod(shape)) * itemsize(name), np.uint8)
    row = DTYPES[name]
    if row.bits < 8:
        raw &= (1 << row.bits) - 1
    array = raw.view(numpy_dtype(name)).reshape(shape)
    # the upper bits of a narrow signed integer repeat its sign
    return array.astype(np.int8).astype(array.dtype) if row.kind == "int" and row.numpy else array


class FrameworkContract:
    """Subclass this, set `framework` and `dtypes`, and say how tensors are made and read."""

    framework: str
    dtypes: tuple[str, ...]
    no_file: tuple[str, ...] = ()  # dtypes that files of the framework cannot hold

    def tensor(self, array: np.ndarray, dtype: str):
        """Return a tensor of the framework with the bytes of an array."""
        raise NotImplementedError

    def contents(self, tensor) -> bytes:
        """Return the bytes of a tensor in C order, by other means than the adapter's."""
        raise NotImplementedError

    def is_tensor(self, value) -> bool:
        """Return whether a value is a tensor of the framework."""
        raise NotImplementedError

    def one(self, dtype: str = "float32", shape: tuple[int, ...] = (3, 4, 5)):
        return self.tensor(any_values(dtype, shape), dtype)

    def test_is_found_after_its_import(self):
        assert self.framework in [framework.name for framework in loaded_frameworks()]
        assert framework_named(self.framework).name == self.framework

    def test_recognizes_its_own_values_only(self):
        framework = framework_named(self.framework)
        assert framework.adapter(type(self.one())) is adapter_of(type(self.one()))
        for cls in (int, dict, type(None), object, type(sys)):
            assert framework.adapter(cls) is None

    def test_round_trip(self, dtype):
        for shape in SHAPES:
            value = self.one(dtype, shape)
            node, nbytes = snapshot(value, POOL)
            assert (node.framework, node.dtype, node.shape) == (self.framework, dtype, shape)
            assert nbytes == nbytes_of(value) == view_of(node.data).nbytes
            assert describe(value)[1:] == (dtype, shape)
            if nbytes <= SMALL and not hasattr(node.data, "settle"):
                assert isinstance(node.data, bytes)
            rebuilt = rebuild(node)
            assert self.is_tensor(rebuilt)
            assert describe(rebuilt)[1:] == (dtype, shape)
            assert self.contents(rebuilt) == self.contents(value)

    def test_array_and_digest_of_the_contents(self, dtype):
        value = self.one(dtype)
        array = tap.rooms.watch.array_of(value)
        assert array.tobytes() == self.contents(value)
        assert array.shape == (3, 4, 5)
        same = TensorData("numpy", dtype, (3, 4, 5), self.contents(value))
        assert digest_of(value) == digest(same)
        assert digest_of(value) != digest_of(self.tensor(any_values(dtype, (3, 20)), dtype))

    def test_statistics(self, dtype):
        value = self.one(dtype, (40, 30, 25))
        node = TensorData("numpy", dtype, (40, 30, 25), self.contents(value))
        summary, pending = summary_of(value)
        assert pending is None
        assert repr(summary) == repr(summarize_array(as_numpy(node)))
        assert repr(tap.viz.summarize(value)) == repr(summary)

    def test_rebuilt_tensors_belong_to_the_caller(self):
        node, _ = snapshot(self.one(), POOL)
        before = self.contents(rebuild(node))
        again = rebuild(node)
        with contextlib.suppress(TypeError):
            again *= 0  # in place, where a framework has that
        assert self.contents(rebuild(node)) == before

    def test_snapshots_outlive_the_tensor(self):
        for shape in ((10,), (100, 1000)):
            value = self.one(shape=shape)
            before = self.contents(value)
            node, _ = snapshot(value, POOL)
            del value
            others = [self.one(shape=shape) for _ in range(5)]
            assert self.contents(rebuild(node)) == before
            del others

    def test_inside_containers(self):
        value = {"a": [self.one(), (1.5, self.one("int32"))]}
        rebuilt = rebuild(snapshot(value, POOL)[0])
        assert self.contents(rebuilt["a"][0]) == self.contents(value["a"][0])
        assert self.is_tensor(rebuilt["a"][1][1])

    @pytest.mark.parametrize(
        ("shape", "data"), [((2,), b"1234567"), ((-1, -1), b"1234"), ((2**40, 2**40), b"")]
    )
    def test_rebuild_rejects_bytes_that_do_not_fit(self, shape, data):
        with pytest.raises(WireError):
            rebuild(TensorData(self.framework, "float32", shape, data))

    @pytest.mark.slow
    def test_catch_dump_and_compare(self, tmp_path):
        values = {dtype: self.one(dtype) for dtype in self.dtypes}
        large = self.one(shape=(100, 200))
        folder = tap.init(tmp_path)
        try:
            files = {dtype: tap.dump(value, dtype) for dtype, value in values.items()
                     if dtype not in self.no_file}  # fmt: skip
            for dtype, value in values.items():
                tap.catch(value, f"caught {dtype}")
            tap.catch(large, "large")
        finally:
            tap.finish()
        run = tap.open(folder)
        for dtype, value in values.items():
            contents = self.contents(value)
            assert self.contents(run.get(f"caught {dtype}")) == contents
            assert tap.compare(value, self.one(dtype))
            if dtype in files:
                assert tap.rooms.watch.array_of(load_file(files[dtype])).tobytes() == contents
                assert tap.compare(value, files[dtype])
        assert self.is_tensor(run.get("large"))
        assert self.contents(run.get("large")) == self.contents(large)

    def test_compare_finds_a_difference(self):
        changed = any_values("int32", (3, 4, 5)).copy()
        changed[1, 2, 3] ^= 1
        found = tap.compare(self.one("int32"), self.tensor(changed, "int32"))
        assert not found
        assert found.mismatches == 1
