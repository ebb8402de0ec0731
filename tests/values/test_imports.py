"""Frameworks are imported late, and rebuilding works without them."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tensortap.values.registry import part_named, parts

FRAMEWORKS = ("numpy", "torch", "jax", "ml_dtypes", "xxhash")


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_imports_no_framework():
    code = f"""
        import sys, tensortap.values as arrays
        from tensortap.core.buffers import Pool
        value = {{"a": [1.0, "x", 2j, 1 << 90, {{3}}, object()]}}
        arrays.snapshot(value, Pool())
        arrays.describe(value), arrays.nbytes_of(value)
        arrays.itemsize("bfloat16"), arrays.rebuild(arrays.snapshot([1], Pool())[0])
        print(*({FRAMEWORKS!r} & sys.modules.keys()))
    """.replace(repr(FRAMEWORKS), repr(set(FRAMEWORKS)))
    assert run(code) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "value"), [("torch", "torch.ones(3)"), ("jax", "jax.numpy.ones(3)")]
)
def test_imports_only_the_framework_of_the_value(framework, value):
    code = f"""
        import sys, {framework}
        before = set(sys.modules)
        import tensortap.values as arrays
        from tensortap.core.buffers import Pool
        node, _ = arrays.snapshot({value}, Pool())
        arrays.rebuild(node), arrays.digest(node)
        print(*({{"torch", "jax", "jaxlib"}} & (set(sys.modules) - before)))
    """
    assert run(code) == []


def test_rebuilds_with_numpy_if_a_framework_cannot_be_imported():
    code = """
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torch", "jax", "jaxlib"):
                    raise error("blocked")
        sys.meta_path.insert(0, Block())
        import tensortap.values as arrays
        from tensortap.values.rebuild import _builder
        from tensortap.core.record import TensorData
        for error in (ImportError, OSError, RuntimeError):
            _builder.cache_clear()
            for framework in ("torch", "jax"):
                node = TensorData(framework, "bfloat16", (2,), b"\\x80\\x3f\\x00\\x40")
                back = arrays.rebuild(node)
                print(type(back).__name__, back.dtype, *back.tolist())
        for name in ("float4_e2m1fn_x2", "int3", "bits8", "complex32"):
            back = arrays.rebuild(TensorData("torch", name, (1,), bytes(arrays.itemsize(name))))
            assert back.tobytes() == bytes(arrays.itemsize(name))
    """
    assert run(code) == ["ndarray", "bfloat16", "1.0", "2.0"] * 6


def test_rebuilding_with_jax_leaves_accelerator_memory_to_training(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    code = """
        import os
        import tensortap.values.jax
        print(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
    """
    assert run(code) == ["false"]


def test_ignores_frameworks_that_are_being_imported():
    code = """
        import sys, types
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["jax"] = types.ModuleType("jax")
        import tensortap.values as arrays
        from tensortap.core.buffers import Pool
        class Thing: pass
        print(type(arrays.snapshot(Thing(), Pool())[0]).__name__)
        print(arrays.snapshot([1.5], Pool())[1])
    """
    assert run(code) == ["Opaque", "8"]


def test_parts_are_modules_named_after_loaded_frameworks():
    assert torch.Tensor
    names = [part.__name__ for part in parts("tensortap.rooms.ops")]
    assert names == ["tensortap.rooms.ops.torch"]
    assert part_named("tensortap.rooms.ops", "mlx") is None
