"""Frameworks are imported late, and rebuilding works without them."""

import os
import subprocess
import sys
import textwrap

import pytest

import tensortap.values

FRAMEWORKS = ("numpy", "torch", "jax", "ml_dtypes", "xxhash")


def run(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_exported_names():
    assert sorted(tensortap.values.__all__) == tensortap.values.__all__
    assert all(hasattr(tensortap.values, name) for name in tensortap.values.__all__)


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


@pytest.mark.parametrize(
    ("framework", "value"),
    [
        ("numpy", "numpy.ones(3)"),
        pytest.param("torch", "torch.ones(3)", marks=pytest.mark.slow),
        pytest.param("jax", "jax.numpy.ones(3)", marks=pytest.mark.slow),
    ],
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
            for framework in ("torch", "jax", "torch"):
                node = TensorData(framework, "bfloat16", (2,), b"\\x80\\x3f\\x00\\x40")
                back = arrays.rebuild(node)
                print(type(back).__name__, back.dtype, *back.tolist())
        for name in ("float4_e2m1fn_x2", "int3", "bits8", "complex32"):
            back = arrays.rebuild(TensorData("torch", name, (1,), bytes(arrays.itemsize(name))))
            assert back.tobytes() == bytes(arrays.itemsize(name))
    """
    assert run(code) == ["ndarray", "bfloat16", "1.0", "2.0"] * 9


def test_older_releases_of_ml_dtypes():
    code = """
        import ml_dtypes, numpy
        del ml_dtypes.complex32, ml_dtypes.int2
        import tensortap.values as arrays
        print(arrays.numpy_dtype("complex32"), arrays.numpy_dtype("int2"))
    """
    assert run(code) == ["uint32", "uint8"]


@pytest.mark.parametrize("setting", [None, "true"])
def test_rebuilding_with_jax_leaves_accelerator_memory_to_training(setting, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    code = """
        import os
        import tensortap.values.jax
        print(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
    """
    env = {} if setting is None else {"XLA_PYTHON_CLIENT_PREALLOCATE": setting}
    assert run(code, **env) == [setting or "false"]


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
