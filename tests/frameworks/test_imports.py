"""What is imported, when, and what happens without it."""

import os
import subprocess
import sys
import textwrap

import pytest

import tensortap.frameworks

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


def test_what_the_room_shows():
    assert sorted(tensortap.frameworks.__all__) == tensortap.frameworks.__all__
    assert all(hasattr(tensortap.frameworks, name) for name in tensortap.frameworks.__all__)


def test_importing_imports_no_framework():
    code = f"""
        import sys, tensortap.frameworks as arrays
        from tensortap.buffers import Pool
        value = {{"a": [1.0, "x", 2j, 1 << 90, {{3}}, object()]}}
        arrays.snapshot(value, Pool())
        arrays.describe(value), arrays.nbytes_of(value)
        arrays.itemsize("bfloat16"), arrays.rebuild(arrays.snapshot([1], Pool())[0])
        print(*({FRAMEWORKS!r} & sys.modules.keys()))
    """.replace(repr(FRAMEWORKS), repr(set(FRAMEWORKS)))
    assert run(code) == []


@pytest.mark.parametrize(
    ("framework", "value"),
    [("numpy", "numpy.ones(3)"), ("torch", "torch.ones(3)"), ("jax", "jax.numpy.ones(3)")],
)
def test_only_the_framework_at_hand_is_imported(framework, value):
    code = f"""
        import sys, {framework}
        before = set(sys.modules)
        import tensortap.frameworks as arrays
        from tensortap.buffers import Pool
        node, _ = arrays.snapshot({value}, Pool())
        arrays.rebuild(node), arrays.digest(node)
        print(*({{"torch", "jax", "jaxlib"}} & (set(sys.modules) - before)))
    """
    assert run(code) == []


BLOCKED = """
    import sys
    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {blocked!r}:
                raise {error}("blocked")
    sys.meta_path.insert(0, Block())
    import tensortap.frameworks as arrays
    from tensortap.record import TensorData
"""


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_without_its_framework_a_tensor_comes_back_as_numpy(error):
    code = textwrap.dedent(BLOCKED.format(blocked=("torch", "jax", "jaxlib"), error=error))
    code += textwrap.dedent("""
        for framework in ("torch", "jax", "torch"):
            back = arrays.rebuild(TensorData(framework, "bfloat16", (2,), b"\\x80\\x3f\\x00\\x40"))
            print(type(back).__name__, back.dtype, *back.tolist())
        for name in ("float4_e2m1fn_x2", "int3", "bits8", "complex32"):
            back = arrays.rebuild(TensorData("torch", name, (1,), bytes(arrays.itemsize(name))))
            assert back.tobytes() == bytes(arrays.itemsize(name))
    """)
    assert run(code) == ["ndarray", "bfloat16", "1.0", "2.0"] * 3


def test_an_older_ml_dtypes_lacks_some_dtypes():
    code = """
        import ml_dtypes, numpy
        del ml_dtypes.complex32, ml_dtypes.int2
        import tensortap.frameworks as arrays
        print(arrays.numpy_dtype("complex32"), arrays.numpy_dtype("int2"))
    """
    assert run(code) == ["uint32", "uint8"]


def test_looking_at_a_jax_array_does_not_take_the_accelerator():
    code = """
        import os, sys
        import tensortap.frameworks as arrays
        from tensortap.record import TensorData
        back = arrays.rebuild(TensorData("jax", "int8", (1,), b"a"))
        print(type(back).__name__, os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
    """
    assert run(code, XLA_PYTHON_CLIENT_PREALLOCATE="true") == ["ArrayImpl", "true"]
    os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    assert run(code) == ["ArrayImpl", "false"]


def test_a_framework_that_is_half_imported_is_no_hindrance():
    code = """
        import sys, types
        sys.modules["torch"] = types.ModuleType("torch")
        sys.modules["jax"] = types.ModuleType("jax")
        import tensortap.frameworks as arrays
        from tensortap.buffers import Pool
        class Thing: pass
        print(type(arrays.snapshot(Thing(), Pool())[0]).__name__)
        print(arrays.snapshot([1.5], Pool())[1])
    """
    assert run(code) == ["Opaque", "8"]
