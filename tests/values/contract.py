"""What every framework promises: `TestTorch(FrameworkContract)` and its like check it."""

from __future__ import annotations

import contextlib
import sys

import pytest

import tensortap as tap
from tensortap.core.buffers import Pool
from tensortap.core.errors import WireError
from tensortap.core.record import TensorData
from tensortap.rooms.doctor.contract import Contract, any_values
from tensortap.rooms.dump.files import load_file
from tensortap.values import rebuild, snapshot, summary_of
from tensortap.values.adapters import adapter_of
from tensortap.values.registry import framework_named, loaded_frameworks

POOL = Pool()


class FrameworkContract(Contract):
    """Subclass this with the contract of a framework, or say how its tensors are made and read."""

    no_file: tuple[str, ...] = ()  # dtypes that files of the framework cannot hold

    def test_is_found_after_its_import(self):
        assert self.framework in [framework.name for framework in loaded_frameworks()]
        assert framework_named(self.framework).name == self.framework

    def test_recognizes_its_own_values_only(self):
        framework = framework_named(self.framework)
        assert framework.adapter(type(self.one())) is adapter_of(type(self.one()))
        for cls in (int, dict, type(None), object, type(sys)):
            assert framework.adapter(cls) is None

    def test_snapshots(self, dtype):
        self.check_snapshots(dtype)

    def test_digests(self, dtype):
        self.check_digests(dtype)
        value = self.one(dtype)
        array = tap.rooms.watch.array_of(value)
        assert array.tobytes() == self.contents(value)
        assert array.shape == (3, 4, 5)

    def test_statistics(self, dtype):
        self.check_statistics(dtype)
        value = self.one(dtype, (40, 30, 25))
        assert repr(tap.viz.summarize(value)) == repr(summary_of(value))

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
            self.overwrite(value)
            del value
            others = [self.one(shape=shape) for _ in range(5)]
            assert self.contents(rebuild(node)) == before
            del others

    def test_inside_containers(self):
        value = {"a": [self.one(), (1.5, self.one("int32"))]}
        rebuilt = rebuild(snapshot(value, POOL)[0])
        assert self.contents(rebuilt["a"][0]) == self.contents(value["a"][0])
        assert type(rebuilt["a"][1][1]) is type(self.one())

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
        assert type(run.get("large")) is type(large)
        assert self.contents(run.get("large")) == self.contents(large)

    def test_compare_finds_a_difference(self):
        changed = any_values("int32", (3, 4, 5)).copy()
        changed[1, 2, 3] ^= 1
        found = tap.compare(self.one("int32"), self.tensor(changed, "int32"))
        assert not found
        assert found.mismatches == 1
