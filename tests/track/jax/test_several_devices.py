"""Arrays and functions that are spread over several devices, in a process that has four."""

import os
import subprocess
import sys
import textwrap

import pytest

CODE = """
    import flax.linen as nn, jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from tensortap.core.buffers import Pool
    from tensortap.core.record import Shard
    from tensortap.values import rebuild, snapshot
    from tensortap.values.jax.adapter import Deferred
    from tensortap.rooms.track.jax.intercept import Intercept

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, columns, everywhere = (NamedSharding(mesh, s) for s in (P("x"), P(None, "x"), P()))

    for sharding in (rows, columns, everywhere):
        array = jax.device_put(jnp.arange(64.).reshape(8, 8), sharding)
        node, nbytes = snapshot(array, Pool())
        assert isinstance(node.data, Deferred) and nbytes == 256
        jax.jit(lambda x: x * 0, donate_argnums=0)(array)
        assert array.is_deleted()
        np.testing.assert_array_equal(rebuild(node), np.arange(64.).reshape(8, 8))
    other = jax.device_put(jnp.arange(3.), jax.devices()[2])
    assert rebuild(snapshot(other, Pool())[0]).tolist() == [0, 1, 2]

    model, x = nn.Dense(8), np.ones((8, 4), np.float32)
    kernel, bias = np.full((4, 8), 0.5, np.float32), np.zeros(8, np.float32)
    params = {"params": {"kernel": kernel, "bias": bias}}
    loss = lambda params, x: jnp.tanh(model.apply(params, x)).sum()
    inner = jax.jit(jax.grad(loss), in_shardings=(everywhere, rows), out_shardings=everywhere)

    def update(params, x):
        return jax.tree.map(lambda p, g: p - g, params, inner(params, x)), x * 2

    for donate in ((), (0,)):
        fn = jax.jit(update, in_shardings=(everywhere, rows), out_shardings=(everywhere, columns),
                     donate_argnums=donate)
        want = fn(jax.device_put(params), x)
        intercept = Intercept()
        for place in (None, everywhere):
            results, seen = intercept(fn, jax.device_put(params, place), x)
            for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(want), strict=True):
                assert a.sharding == b.sharding, (a.sharding, b.sharding)
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            assert len(seen) == 2 and seen[0].pending.resolve().count == 64, seen
            assert not intercept.unseen, intercept.unseen

    # tap.catch in shard_map: each value has its device, and the program agrees with itself
    import logging, tempfile, tensortap as tap
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tensortap").addHandler(handler)
    grid = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def double(x):
        tap.catch(x * 2, "doubled")
        tap.catch(x.sum(), "sum", every=2)
        tap.catch(jax.lax.psum(x, ("x", "y")), "total")
        tap.catch(x, "wrong", shard=P("x", "y"))
        return x * 2

    mapped = jax.jit(jax.shard_map(double, mesh=grid, in_specs=P("x", "y"), out_specs=P("x", "y")))
    x, runs = jnp.arange(16.0).reshape(4, 4), []
    for _ in range(2):
        runs.append(tap.init(tempfile.mkdtemp()))
        for step in range(4):
            tap.step(step)
            for _ in range(2):
                mapped(x + step)
        tap.finish()
    assert "shard= has no effect in a compiled function" in messages[0], messages
    assert "wrong" not in tap.open(runs[0]).names()
    run = tap.open(runs[0])
    records = zip(run.records("doubled"), run.get_all("doubled"), strict=True)
    found = {(r.step, r.call): (r.tags, value) for r, value in records}
    assert sorted(found) == [(step, call) for step in range(4) for call in range(8)]
    for (step, call), (tags, value) in found.items():
        i, j = divmod(call % 4, 2)
        assert tags == {"device": f"x={i} y={j}", "devices": "4"}, tags
        want = 2 * np.asarray(x + step)[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
        np.testing.assert_array_equal(value, want)
    assert len(list(run.records("sum"))) == 16  # every second call of each device
    in_order = lambda name: sorted(run.records(name), key=lambda r: (r.step, r.call))
    shards = {name: [r.shard for r in in_order(name)][:4] for name in run.names()}
    places = [(i, j) for i in range(2) for j in range(2)]
    assert shards["sum"] == [Shard((2, 2), at, ("S(0)", "S(1)")) for at in places]
    assert shards["doubled"] == [
        Shard((2, 2, 2, 2), (*at, 0, 0), ("S(0)", "S(1)")) for at in places
    ]
    assert shards["total"] == shards["doubled"]
    report = tap.compare(*runs[:2])
    assert report and report.compared == 8 + 4 + 8, report  # devices are put together

    apply = lambda params, x: model.apply(params, x)
    mapped = jax.jit(jax.shard_map(apply, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x")))
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    for fn, rows in ((mapped, x), (jax.pmap(apply, in_axes=(None, 0)), x.reshape(4, 2, 4))):
        intercept = Intercept()
        results, seen = intercept(fn, params, rows)
        assert (results == fn(params, rows)).all() and not seen
        assert list(intercept.unseen) == ["Dense"], intercept.unseen

    caught = tap.init(tempfile.mkdtemp())
    jax.pmap(lambda x: tap.catch(x + 1, "row") and None or x)(x.reshape(4, 8))
    tap.finish()
    run = tap.open(caught)
    rows = in_order("row")
    assert [r.tags["device"] for r in rows] == [f"pmap={i}" for i in range(4)]
    assert [r.shard.offsets for r in rows] == [(i, 0) for i in range(4)]
    values = dict(zip((r.call for r in run.records("row")), run.get_all("row"), strict=True))
    np.testing.assert_array_equal([values[i] for i in range(4)], x.reshape(4, 8) + 1)
"""


@pytest.mark.slow
def test_arrays_and_functions_over_several_devices():
    flags = "--xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE)],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
