"""Operations of JAX programs."""

from __future__ import annotations

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import tensortap as tap


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        x = jnp.sqrt(x)
        return nn.Dense(2)(x)


NET = Net()


@jax.jit
def update(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(NET.apply(p, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_operations_have_modules_lines_and_reasons():
    params = NET.init(jax.random.key(0), jnp.ones((3, 4)))
    plain, loss = update(params, jnp.ones((3, 4)))
    with tap.ops() as ops:
        observed, same = ops.intercept(update, params, jnp.ones((3, 4)))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(observed), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert np.asarray(loss).tobytes() == np.asarray(same).tobytes()
    lines, start = inspect.getsourcelines(Net)
    number = start + next(i for i, line in enumerate(lines) if "sqrt" in line)
    root = next(r for r in ops.records if r.tags["op"] == "sqrt")
    assert root.tags["line"] == f"{__file__}:{number}"
    assert (root.tags["module"], root.type) == ("Net", "jax.lax.sqrt")
    dots = [
        (r.tags["module"], r.tags["phase"]) for r in ops.records if r.tags["op"] == "dot_general"
    ]
    assert dots[:2] == [("Net.Dense_0", "forward"), ("Net.Dense_1", "forward")]
    assert ("Net.Dense_1", "backward") in dots
    found = ops.first_nonfinite
    assert (found.operation, found.line.line) == ("sqrt", number)
    assert found.why.startswith("sqrt of ")
    assert found.why.endswith(" negative numbers")
    assert "one by one" in ops.remarks["update"]


def test_loops_and_branches_are_opened():
    def body(carry, x):
        return carry - x, jnp.log(carry)

    @jax.jit
    def program(start, xs):
        last, logs = jax.lax.scan(body, start, xs)
        last = jax.lax.cond(last > 0, lambda v: v, lambda v: v * 2, last)
        return jax.lax.while_loop(lambda v: v < -1, lambda v: v / 2, last), logs

    expected = program(jnp.float32(1), jnp.ones(3))
    with tap.ops() as ops:
        found = ops.intercept(program, jnp.float32(1), jnp.ones(3))
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one, other, equal_nan=True)
    assert [r.tags["op"] for r in ops.records].count("log") == 3
    assert {"div", "mul"} <= {r.tags["op"] for r in ops.records}
    assert ops.first_nonfinite.why == "log of 0: 1 element is 0"
    assert ops.first_nonfinite.code == "return carry - x, jnp.log(carry)"


def test_a_program_with_results_of_callbacks_runs_once(monkeypatch):
    monkeypatch.setattr("tensortap.capture.pipeline.pipeline.strict", False)
    calls = []

    def count(x):
        calls.append(1)
        return x

    @jax.jit
    def program(x):
        return jax.experimental.io_callback(count, x, x)

    with tap.ops() as ops:
        ops.intercept(program, jnp.float32(1))
    jax.effects_barrier()
    assert len(calls) == 1
    assert "callbacks" in ops.remarks["program"]
    assert ops.records == []
