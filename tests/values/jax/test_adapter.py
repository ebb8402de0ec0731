"""JAX arrays: ready or unfinished, donated, deleted, in any layout; tracers and random keys."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tensortap.core.buffers import Lease, Pool, view_of
from tensortap.core.errors import CaptureError
from tensortap.core.record import TensorData
from tensortap.rooms.doctor.jax import JaxContract
from tensortap.rooms.track.digests import shard_digest_of
from tensortap.rooms.track.shard_digest import shard_digest
from tensortap.values import describe, nbytes_of, rebuild, snapshot
from tensortap.values.jax.adapter import Deferred
from tests.values.contract import FrameworkContract, any_values

POOL = Pool()


def check(array):
    node, nbytes = snapshot(array, POOL)
    assert nbytes == nbytes_of(array) == view_of(node.data).nbytes
    rebuilt = rebuild(node)
    assert rebuilt.dtype == array.dtype
    assert np.asarray(rebuilt).tobytes() == np.asarray(array).tobytes()
    return node


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("float32", (3, 4, 5), bytes),
        ("float32", (40, 30, 25), Lease),
        ("int4", (3, 4, 5), Deferred),  # packed: two elements share a byte
        ("int4", (0, 3), bytes),
    ],
)
def test_reads_in_place_unless_elements_are_packed(name, shape, kind):
    array = jax.device_put(any_values(name, shape)).block_until_ready()
    assert isinstance(check(array).data, kind)


@pytest.mark.parametrize("name", ["int64", "complex128"])
def test_rebuilds_64_bit_arrays_with_numpy_without_x64(name):
    with jax.enable_x64(True):
        array = jax.device_put(any_values(name, (3, 4))).block_until_ready()
        node, _ = snapshot(array, POOL)
        assert isinstance(rebuild(node), jax.Array)
        assert rebuild(node).dtype == name
    # JAX would claim 64 bits but compute in 32
    rebuilt = rebuild(node)
    assert type(rebuilt) is np.ndarray
    assert rebuilt.dtype == name
    assert rebuilt.tobytes() == np.asarray(array).tobytes()


def test_layouts():
    array = jnp.arange(12.0).reshape(3, 4)
    check(array.T)
    check(array[::2, 1:])
    columns = Format(Layout(major_to_minor=(1, 0)), array.sharding)
    transposed = jax.device_put(array, columns)
    assert isinstance(check(transposed).data, Deferred)


@jax.jit
def slow(x):
    for _ in range(12):
        x = jnp.sin(x @ x)
    return x


SIZE = 900


@pytest.fixture
def unfinished():
    """Return an array that JAX is still computing, and its value."""
    start = jnp.ones((SIZE, SIZE)) / SIZE
    expected = np.array(slow(start))
    for _ in range(20):
        array = slow(start)
        if not array.is_ready():
            return array, expected
    raise AssertionError("JAX computed everything at once")


def donate(array):
    jax.jit(lambda x: x * 0 - 7, donate_argnums=0)(array).block_until_ready()


@pytest.mark.slow
@pytest.mark.parametrize("end", [donate, lambda array: array.delete()])
def test_does_not_wait_for_unfinished_arrays(unfinished, end):
    """The program may donate or delete them, and several threads may wait for their bytes."""
    array, expected = unfinished
    node, nbytes = snapshot(array, POOL)
    assert not array.is_ready()
    assert isinstance(node.data, Deferred)
    assert node.data.nbytes == nbytes == expected.nbytes
    end(array)
    assert array.is_deleted()
    seen = []
    threads = [
        threading.Thread(target=lambda: seen.append(bytes(node.data.view))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected.tobytes()] * 4
    np.testing.assert_array_equal(np.asarray(rebuild(node)), expected)


@pytest.mark.slow
def test_digests_wait_for_unfinished_arrays(unfinished):
    array, expected = unfinished
    pending = shard_digest_of(array)
    donate(array)
    assert pending.resolve() == shard_digest(expected)
    assert pending.ready()


@pytest.mark.slow
def test_ignores_transfer_guards(unfinished):
    array, expected = unfinished
    ones = jnp.ones(3)
    with jax.transfer_guard("disallow"):
        node, _ = snapshot(array, POOL)
        small, _ = snapshot(ones, POOL)
        np.testing.assert_array_equal(view_of(node.data), expected.reshape(-1).view(np.uint8))
        rebuild(small)


@pytest.mark.slow
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


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_rejects_tracers(transform):
    def function(x):
        with pytest.raises(CaptureError, match="inside jit"):
            snapshot(x, POOL)
        assert describe(x)[0].startswith("jax")
        return x * 2

    transform(function)(1.0)


def test_rejects_deleted_arrays():
    array = jnp.ones(3) + 1
    array.delete()
    with pytest.raises(CaptureError, match="donated or deleted"):
        snapshot(array, POOL)


def test_rejects_random_keys():
    key = jax.random.key(0)
    with pytest.raises(CaptureError, match="key_data"):
        snapshot(key, POOL)
    assert describe(key)[1:] == ("key<fry>", ())
    check(jax.random.key_data(key))
    check(jax.random.PRNGKey(0))


def test_reports_a_failed_computation():
    class Broken:
        def __array__(self, *args, **kwargs):
            raise RuntimeError("out of memory")

    with pytest.raises(CaptureError, match="never computed: out of memory"):
        Deferred(Broken(), 4).view


def test_rebuilds_dtypes_that_jax_lacks_with_numpy():
    back = rebuild(TensorData("jax", "float6_e2m3fn", (2,), b"\x01\x02"))
    assert isinstance(back, np.ndarray)
    assert back.tobytes() == b"\x01\x02"
    assert isinstance(rebuild(TensorData("jax", "<U1", (1,), b"a\0\0\0")), np.ndarray)


class TestJax(JaxContract, FrameworkContract):
    pass
