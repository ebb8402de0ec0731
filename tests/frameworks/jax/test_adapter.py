import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tensortap.buffers import Lease, Pool, view_of
from tensortap.errors import CaptureError
from tensortap.frameworks import SMALL, describe, nbytes_of, rebuild, snapshot
from tensortap.frameworks.jax.adapter import _PACKED, Deferred, _axes
from tensortap.record import TensorData

POOL = Pool()

DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32",
    "complex64", "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
    "int1", "int2", "int4", "uint1", "uint2", "uint4",
]  # fmt: skip
WIDE = ["int64", "uint64", "float64", "complex128"]


def any_values(name, shape):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    random = np.random.default_rng(0)
    if name.startswith(("int1", "int2", "int4", "uint1", "uint2", "uint4")) and dtype.itemsize == 1:
        return random.integers(0, 2, shape).astype(dtype)
    if name == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if name == "float4_e2m1fn":
        return random.integers(0, 16, shape, np.uint8).view(dtype)
    raw = random.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


def check(array):
    expected = np.asarray(array)
    node, nbytes = snapshot(array, POOL)
    assert (node.framework, node.dtype, node.shape) == ("jax", array.dtype.name, array.shape)
    assert nbytes == nbytes_of(array) == view_of(node.data).nbytes == node_size(node)
    back = rebuild(node)
    assert isinstance(back, jax.Array)
    assert back.dtype == array.dtype
    assert np.asarray(back).tobytes() == expected.tobytes()
    return node


def node_size(node):
    return len(node.data) if isinstance(node.data, bytes) else node.data.nbytes


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 4, 5), (40, 30, 25)])
@pytest.mark.parametrize("name", DTYPES)
def test_round_trip(name, shape):
    array = jax.device_put(any_values(name, shape))
    node = check(array)
    packed = name in _PACKED and 0 not in shape
    kind = Deferred if packed else bytes if nbytes_of(array) <= SMALL else Lease
    assert isinstance(node.data, kind)
    assert describe(array)[1:] == (name, shape)


@pytest.mark.parametrize("shape", [(3, 4), (100, 90)])
@pytest.mark.parametrize("name", WIDE)
def test_64_bits_come_back_as_they_were(name, shape):
    with jax.enable_x64(True):
        array = jax.device_put(any_values(name, shape))
        node, _ = snapshot(array, POOL)
        assert isinstance(rebuild(node), jax.Array)
        assert rebuild(node).dtype == name
    # without x64 JAX would compute with it in 32 bits under the name of 64
    back = rebuild(node)
    assert type(back) is np.ndarray
    assert back.dtype == name
    assert back.tobytes() == np.asarray(array).tobytes()


def test_layouts():
    array = jnp.arange(12.0).reshape(3, 4)
    check(array.T)
    check(array[::2, 1:])
    columns = Format(Layout(major_to_minor=(1, 0)), array.sharding)
    turned = jax.device_put(array, columns)
    assert _axes(turned) == (1, 0)
    assert isinstance(check(turned).data, Deferred)


def test_the_caller_owns_what_comes_back():
    node, _ = snapshot(jnp.zeros(3), POOL)
    back = rebuild(node)
    assert back.at[0].set(1)[0] == 1
    jax.jit(lambda x: x + 1, donate_argnums=0)(back)
    assert not np.asarray(rebuild(node)).any()


@jax.jit
def slow(x):
    for _ in range(12):
        x = jnp.sin(x @ x)
    return x


SIZE = 900


@pytest.fixture
def unfinished():
    """Something that JAX is still computing, and what it will be."""
    start = jnp.ones((SIZE, SIZE)) / SIZE
    expected = np.array(slow(start))
    for _ in range(20):
        array = slow(start)
        if not array.is_ready():
            return array, expected
    raise AssertionError("JAX computed everything at once")


def test_unfinished_arrays_are_not_waited_for(unfinished):
    array, expected = unfinished
    node, nbytes = snapshot(array, POOL)
    assert not array.is_ready()
    assert isinstance(node.data, Deferred)
    assert node.data.nbytes == nbytes == expected.nbytes
    np.testing.assert_array_equal(np.asarray(rebuild(node)), expected)


def test_unfinished_arrays_may_be_donated(unfinished):
    array, expected = unfinished
    node, _ = snapshot(array, POOL)
    jax.jit(lambda x: x * 0 - 7, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
    np.testing.assert_array_equal(np.asarray(rebuild(node)), expected)


def test_unfinished_arrays_may_be_deleted(unfinished):
    array, expected = unfinished
    node, _ = snapshot(array, POOL)
    array.delete()
    np.testing.assert_array_equal(np.asarray(rebuild(node)), expected)


def test_several_sinks_may_wait_at_once(unfinished):
    array, expected = unfinished
    node, _ = snapshot(array, POOL)
    seen = []
    threads = [
        threading.Thread(target=lambda: seen.append(bytes(node.data.view))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected.tobytes()] * 4
    node.data.settle()


def test_ready_arrays_may_be_donated_right_after():
    array = jnp.arange(100_000.0)
    array.block_until_ready()
    node, _ = snapshot(array, POOL)
    assert isinstance(node.data, Lease)
    jax.jit(lambda x: x * 0 - 7, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
    np.testing.assert_array_equal(np.asarray(rebuild(node)), np.arange(100_000.0))


def test_transfer_guards_are_not_meant_for_us(unfinished):
    array, expected = unfinished
    ones = jnp.ones(3)
    with jax.transfer_guard("disallow"):
        node, _ = snapshot(array, POOL)
        small, _ = snapshot(ones, POOL)
        np.testing.assert_array_equal(view_of(node.data), expected.reshape(-1).view(np.uint8))
        rebuild(small)


def test_constants_inside_jit(unfinished):
    array, expected = unfinished
    small = jnp.ones(3)
    nodes = []

    @jax.jit
    def function(x):
        nodes.extend(snapshot(value, POOL)[0] for value in (array, small))
        nodes.append(rebuild(nodes[1]))
        return x

    function(1.0)
    np.testing.assert_array_equal(np.asarray(rebuild(nodes[0])), expected)
    assert np.asarray(nodes[2]).tolist() == [1, 1, 1]


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.linearize])
def test_inside_a_transformation_there_is_no_value(transform):
    def function(x):
        with pytest.raises(CaptureError, match="inside jit"):
            snapshot(x, POOL)
        assert describe(x)[0].startswith("jax")
        return x * 2

    value = 1.0 if transform is not jax.vmap else jnp.ones(3)
    transform(function)(value) if transform is not jax.linearize else transform(function, value)


def test_deleted_arrays():
    array = jnp.ones(3) + 1
    array.delete()
    with pytest.raises(CaptureError, match="donated or deleted"):
        snapshot(array, POOL)


def test_random_keys():
    key = jax.random.key(0)
    with pytest.raises(CaptureError, match="key_data"):
        snapshot(key, POOL)
    assert describe(key)[1:] == ("key<fry>", ())
    check(jax.random.key_data(key))
    check(jax.random.PRNGKey(0))


def test_a_computation_that_failed():
    class Broken:
        def __array__(self, *args, **kwargs):
            raise RuntimeError("out of memory")

    with pytest.raises(CaptureError, match="never computed: out of memory"):
        Deferred(Broken(), 4).view


def test_a_dtype_that_jax_lacks_comes_back_as_numpy():
    back = rebuild(TensorData("jax", "float6_e2m3fn", (2,), b"\x01\x02"))
    assert isinstance(back, np.ndarray)
    assert back.tobytes() == b"\x01\x02"
    assert isinstance(rebuild(TensorData("jax", "<U1", (1,), b"a\0\0\0")), np.ndarray)
