"""Intercepted functions: what is observed in them, under which names, and that results stay."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import tensortap as tap
from tensortap.rooms.track.jax import device_stats, instrumented_jit
from tensortap.rooms.track.jax.intercept import Intercept
from tensortap.rooms.track.jax.marks import HIDDEN
from tests.track.jax.programs import (
    ACT,
    GRAD,
    MLP,
    MLP_NAMES,
    assert_agrees,
    assert_same,
    batch,
    both_kinds,
    key,
    observed,
    parameters,
    summaries_of,
    training,
)

pytestmark = pytest.mark.slow  # each test compiles; test_catch_in_jit.py has a fast one


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"a": x * 2, "b": (x + 1, jnp.arange(3)), "c": None, "d": 5}


class Shared(nn.Module):
    def setup(self):
        self.dense = nn.Dense(4)

    def __call__(self, x):
        return self.dense(jnp.tanh(self.dense(self.dense(x))))


# -- modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("jitted", [True, False])
def test_activations_and_their_gradients(jitted):
    model, x = MLP(), batch()
    params = parameters(model, x)
    fn = jax.grad(lambda params, x: jnp.mean(model.apply(params, x) ** 2))
    fn = jax.jit(fn) if jitted else fn
    intercept = Intercept()
    results, seen = intercept(fn, params, x)
    assert_same(results, fn(params, x))
    assert intercept.unseen == {}
    summaries = summaries_of(seen)
    assert set(summaries) == both_kinds(*MLP_NAMES)
    assert {o.type for o in observed(seen) if o.name == "Dense_0"} == {"flax.linen.linear.Dense"}
    assert {(o.dtype, o.shape) for o in observed(seen) if o.name == "Dense_0"} == {
        ("float32", (5, 8))
    }

    _, inner = model.apply(params, x, capture_intermediates=True)
    inner = inner["intermediates"]
    assert_agrees(summaries[ACT, "Dense_0", 0], inner["Dense_0"]["__call__"][0])
    output = inner["__call__"][0]
    assert_agrees(summaries[ACT, "MLP", 0], output)
    gradient = jax.grad(lambda y: jnp.mean(y**2))(output)
    assert_agrees(summaries[GRAD, "MLP", 0], gradient)
    assert_agrees(summaries[GRAD, "Dense_1", 0], gradient)


def test_compiled_functions_keep_their_code():
    traced = []
    model, x = MLP(), batch()
    params = parameters(model, x)

    @jax.jit
    def fn(params, x):
        traced.append(1)
        return model.apply(params, x)

    fn(params, x)
    assert len(traced) == 1
    intercept = Intercept()
    for _ in range(3):
        results, seen = intercept(fn, params, x)
        assert len(seen) == 3
    assert_same(results, fn(params, x))
    assert len(traced) == 2  # once more, for the tracker
    intercept(fn, params, batch((7, 4)))
    fn(params, x)
    assert len(traced) == 4  # new shape: with statistics, and plain for the comparison


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        q, k, v = jnp.split(nn.Dense(48, dtype="bfloat16")(h), 3, -1)
        h = nn.softmax(q @ k.swapaxes(-1, -2)) @ v
        return x + nn.Dense(16)(nn.gelu(h))


@pytest.mark.parametrize(
    ("model", "shape", "jitted", "steps"),
    [(Attention(), (3, 6, 16), True, 10), (MLP(), (5, 4), False, 2)],
)
def test_training_steps_are_bit_identical(model, shape, jitted, steps):
    x = batch(shape)
    params, state, update = training(model, optax.sgd(0.1, momentum=0.9 if jitted else None), x)
    fn = jax.jit(update) if jitted else update
    plain = ours = (params, state)
    intercept = Intercept()
    for _ in range(steps):
        plain = fn(*plain, x)[:2]
        results, seen = intercept(fn, *ours, x)
        ours = results[:2]
        assert len(seen) == (8 if jitted else 6)
    assert_same(plain, ours)
    assert intercept.unseen == {}


@pytest.mark.parametrize("jitted", [True, False])
def test_shared_modules_have_one_index_per_call(jitted):
    model, x = Shared(), batch()
    params = parameters(model, x)
    fn = jax.grad(lambda params: jnp.mean(model.apply(params, x) ** 2))
    _, seen = Intercept()(jax.jit(fn) if jitted else fn, params)
    summaries = summaries_of(seen)
    assert {k[2] for k in summaries if k[1] == "dense"} == {0, 1, 2}
    y = model.apply(params, x)
    assert_agrees(summaries[ACT, "dense", 2], y)
    gradient = jax.grad(lambda y: jnp.mean(y**2))(y)
    assert_agrees(summaries[GRAD, "dense", 2], gradient)
    dense = lambda v: nn.Dense(4).apply({"params": params["params"]["dense"]}, v)
    assert_agrees(summaries[ACT, "dense", 0], dense(x))
    rest = lambda h: jnp.mean(dense(jnp.tanh(dense(h))) ** 2)
    gradient = jax.grad(rest)(dense(x))
    assert_agrees(summaries[GRAD, "dense", 0], gradient, 1e-4, same_program=False)


def test_nested_outputs():
    x = batch()
    results, seen = Intercept()(jax.jit(lambda x: Pair().apply({}, x)), x)
    assert results["c"] is None
    assert results["d"] == 5
    summaries = summaries_of(seen)
    assert set(summaries) == {(ACT, f"Pair[{part}]", 0) for part in ("a", "b.0", "b.1")}
    assert_agrees(summaries[ACT, "Pair[a]", 0], x * 2)
    assert_agrees(summaries[ACT, "Pair[b.1]", 0], jnp.arange(3))


def test_observes_only_what_is_wanted():
    model, x = MLP(), batch()
    params = parameters(model, x)
    fn = jax.jit(jax.grad(lambda params: jnp.sum(model.apply(params, x))))
    intercept = Intercept(lambda kind, name: kind is GRAD and name == "Dense_0")
    _, seen = intercept(fn, params)
    assert list(map(key, seen)) == [(GRAD, "Dense_0", 0)]


# -- transformations -------------------------------------------------------------------------


def test_scan_has_one_call_per_iteration():
    dense, x = nn.Dense(4), batch((3, 4))
    params = parameters(dense, x)

    def loss(params, x):
        def body(carry, _):
            return jnp.tanh(dense.apply(params, carry)), None

        return jnp.sum(jax.lax.scan(body, x, None, length=4)[0])

    fn = jax.jit(jax.grad(loss))
    results, seen = Intercept()(fn, params, x)
    assert_same(results, fn(params, x))
    summaries = summaries_of(seen)
    assert set(summaries) == both_kinds("Dense", calls=4)
    h = x
    for i in range(4):
        y = dense.apply(params, h)
        assert_agrees(summaries[ACT, "Dense", i], y, same_program=False)
        h = jnp.tanh(y)
    last = jax.grad(lambda y: jnp.sum(jnp.tanh(y)))(y)
    assert_agrees(summaries[GRAD, "Dense", 3], last, same_program=False)


@pytest.mark.parametrize("jitted", [True, False])
def test_remat_is_observed_once(jitted):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.remat(MLP)(name="block")(x))

    model, x = Model(), batch()
    params = parameters(model, x)
    fn = jax.grad(lambda params: jnp.sum(model.apply(params, x) ** 2))
    fn = jax.jit(fn) if jitted else fn
    results, seen = Intercept()(fn, params)
    assert_same(results, fn(params))
    names = ("block.Dense_0", "block.Dense_1", "block", "Dense_0", "Model")
    assert set(map(key, seen)) == both_kinds(*names)
    assert len(seen) == 2 * len(names)
    summaries, y = summaries_of(seen), model.apply(params, x)
    assert_agrees(summaries[ACT, "Model", 0], y, same_program=False)
    assert_agrees(summaries[GRAD, "Dense_0", 0], 2 * y, same_program=False)


def test_inner_jit_that_was_compiled_before():
    model, x = MLP(), batch()
    params = parameters(model, x)
    inner = jax.jit(jax.value_and_grad(lambda params, x: jnp.sum(model.apply(params, x) ** 2)))
    inner(params, x)

    @jax.jit
    def fn(params, x):
        value, grads = inner(params, x)
        other, _ = inner(params, x + 1)
        return value + other, grads

    intercept = Intercept()
    for _ in range(2):
        results, seen = intercept(fn, params, x)
        assert_same(results, fn(params, x))
        assert intercept.unseen == {}
        summaries = summaries_of(seen)
        assert len(summaries) == len(seen) == 12
        assert_agrees(summaries[ACT, "MLP", 0], model.apply(params, x))
        assert_agrees(summaries[ACT, "MLP", 1], model.apply(params, x + 1))
        assert_agrees(summaries[GRAD, "MLP", 0], 2 * model.apply(params, x))
        assert_agrees(summaries[GRAD, "MLP", 1], 2 * model.apply(params, x + 1))


def test_only_the_taken_branch_of_a_cond_has_statistics():
    model, x = MLP(), batch()
    params = parameters(model, x)

    @jax.jit
    def fn(flag, x):
        run = lambda x: model.apply(params, x)
        return jax.lax.cond(flag, lambda x: run(x * 2), lambda x: run(x)[:, ::-1], x)

    intercept = Intercept()
    for flag, want in ((True, x * 2), (False, x)):
        _, seen = intercept(fn, flag, x)
        summaries = [o.pending.resolve() for o in seen if o.observed.name == "MLP"]
        taken = [summary for summary in summaries if summary is not None]
        assert len(taken) == 1
        assert_agrees(taken[0], model.apply(params, want))


DENSE = nn.Dense(4)
DENSE_PARAMS = parameters(DENSE, batch((3, 4)))


def layer(x):
    return jnp.tanh(DENSE.apply(DENSE_PARAMS, x))


def looped(x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1])), (0, x))


def compiled_inside(x):
    return jax.jit(layer)(x) + 1


@pytest.mark.parametrize("fn", [looped, jax.jit(looped), compiled_inside])
def test_what_cannot_be_reached_is_unseen_and_the_results_stay(fn):
    x = batch((3, 4))
    want = fn(x)
    intercept = Intercept()
    results, seen = intercept(fn, x)
    assert_same(results, want)
    assert seen == []
    assert intercept.unseen == {"Dense": HIDDEN}
    assert_same(fn(x), want)  # the user's own calls are as before


def test_effects_happen_once():
    totals = []

    def body(c, _):
        jax.debug.callback(lambda v: totals.append(float(v)), c.sum())
        return layer(c), None

    fn = jax.jit(lambda x: jax.lax.scan(body, x, None, 2)[0])
    _, seen = Intercept()(fn, batch((3, 4)))
    jax.effects_barrier()
    assert len(totals) == len(seen) == 2


# -- how functions are given -----------------------------------------------------------------


def test_static_arguments():
    model, optimizer, x = MLP(), optax.sgd(1e-2), batch()
    params, state, _ = training(model, optimizer, x)

    def update(params, state, optimizer, x, scale=1.0, *, mode="mean"):
        reduce = {"mean": jnp.mean, "sum": jnp.sum}[mode]
        grads = jax.grad(lambda p: reduce(model.apply(p, x) ** 2) * scale)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    jitted = jax.jit(update, static_argnums=2, static_argnames=("mode",))
    fn = functools.partial(jitted, mode="sum")
    intercept = Intercept()
    results, seen = intercept(fn, params, state, optimizer, x, 2.0)
    assert_same(results, fn(params, state, optimizer, x, 2.0))
    assert len(seen) == 6
    results, _ = intercept(jitted, params, state, optimizer, x, scale=3, mode="mean")
    assert_same(results, jitted(params, state, optimizer, x, scale=3, mode="mean"))
    assert intercept.unseen == {}


def test_donated_arguments_are_donated():
    params, state, update = training(MLP(), optax.adam(1e-2), x := batch())
    fn = jax.jit(update, donate_argnums=(0, 1))
    copies = jax.tree.map(jnp.copy, (params, state))
    want = fn(*copies, x)[:2]
    want = fn(*want, x)
    intercept = Intercept()
    ours, _ = intercept(fn, params, state, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    middle = ours[:2]
    ours, seen = intercept(fn, *middle, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(middle[0]))
    assert len(seen) == 6
    assert intercept.unseen == {}
    assert_same(ours, want)


def test_user_exceptions_are_raised():
    @jax.jit
    def broken(x):
        Pair().apply({}, x)
        raise KeyError("mine")

    for fn in (broken, broken.__wrapped__):
        with pytest.raises(KeyError, match="mine"):
            Intercept()(fn, batch())


def test_programs_that_round_differently_run_twice(monkeypatch):
    model, x = MLP(), batch()
    params = parameters(model, x)

    def loss(params, x):
        return jnp.sum(model.apply(params, x) ** 2), x + 1

    monkeypatch.setattr(instrumented_jit, "identical", lambda a, b: False)
    for fn in (jax.jit(loss), jax.jit(loss, donate_argnums=(1,))):
        intercept = Intercept()
        want = fn(params, jnp.copy(x))
        for _ in range(3):
            results, seen = intercept(fn, params, jnp.copy(x))
            assert_same(results, want)
            assert len(seen) == 3
        assert intercept.unseen == {}
        assert intercept.remarks == {"loss": instrumented_jit.ROUNDS_DIFFERENTLY}


def test_functions_that_run_twice_copy_nothing_and_have_effects_once(monkeypatch):
    model, x = MLP(), batch()
    params = parameters(model, x)
    seen = []

    def loss(params, x, loud):
        if loud:
            jax.debug.callback(seen.append, x[0, 0])
        return jnp.sum(model.apply(params, x) ** 2), x + 1

    monkeypatch.setattr(instrumented_jit, "identical", lambda a, b: False)
    fn = jax.jit(loss, donate_argnums=(1,), static_argnums=(2,))
    intercept = Intercept()
    intercept(fn, params, jnp.copy(x), False)  # both are compared, so the arguments are copied
    monkeypatch.setattr(instrumented_jit, "_copy", lambda leaf: pytest.fail("copied"))
    for _ in range(2):
        donated = jnp.copy(x)
        _, observed = intercept(fn, params, donated, False)
        assert donated.is_deleted()
        assert len(observed) == 3
    monkeypatch.undo()
    intercept(fn, params, jnp.copy(x), True)
    jax.effects_barrier()
    assert len(seen) == 1


def test_tracker_says_what_is_true_of_a_function_that_runs_twice(monkeypatch, caplog):
    monkeypatch.setattr(instrumented_jit, "identical", lambda a, b: False)
    model, x = MLP(), batch()
    params = parameters(model, x)
    with tap.track(params) as tracker:
        tracker.intercept(jax.jit(model.apply), params, x)
        tracker.step(params)
    assert tracker.unseen == {}
    assert "its results come from your own function" in tracker.remarks["apply"]
    assert [(a.rule, a.name) for a in tracker.alerts] == [("remark", "apply")]
    assert "limited" not in caplog.text
    assert "twice the time" in caplog.text


def test_functions_run_unobserved_if_jax_hides_their_options(monkeypatch):
    monkeypatch.setattr(instrumented_jit, "_OPTIONS", "no_such_attribute")
    fn = jax.jit(lambda x: Pair().apply({}, x)["a"])
    intercept = Intercept()
    results, seen = intercept(fn, batch())
    assert_same(results, fn(batch()))
    assert seen == []
    assert "does not tell how it was jitted" in intercept.unseen["<lambda>"]


def test_functions_run_unobserved_if_they_cannot_be_instrumented(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("not today")

    monkeypatch.setattr(instrumented_jit, "evaluate", fail)
    errors = []
    intercept = Intercept(on_error=lambda name, error: errors.append((name, str(error))))
    fn = jax.jit(lambda x: Pair().apply({}, x)["a"])
    results, seen = intercept(fn, batch())
    assert_same(results, fn(batch()))
    assert seen == []
    assert intercept.unseen == {"<lambda>": "not observed: RuntimeError: not today"}
    assert errors == [("<lambda>", "not today")]


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(device_stats, "native", lambda: False)
    model, x = MLP("bfloat16"), batch()
    params = parameters(model, x)
    _, seen = Intercept(lambda kind, name: name == "MLP")(jax.jit(model.apply), params, x)
    assert_agrees(seen[0].pending.resolve(), model.apply(params, x))
