"""Intercepted functions: what is seen in them, under which names, and that nothing else changes."""

import functools
import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tensortap as tap
from tensortap.frameworks import rebuild
from tensortap.frameworks.jax.intercept import Intercept
from tensortap.readers.reader import value_of
from tensortap.record import Kind

ACT, GRAD = Kind.ACTIVATION, Kind.GRADIENT


class MLP(nn.Module):
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=self.dtype)(x)
        x = nn.relu(x)
        return nn.Dense(3, dtype=self.dtype)(x)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {"a": x * 2, "b": (x + 1, jnp.arange(3)), "c": None, "d": 5}


class Shared(nn.Module):
    def setup(self):
        self.dense = nn.Dense(4)

    def __call__(self, x):
        return self.dense(jnp.tanh(self.dense(self.dense(x))))


def batch(shape=(5, 4), seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def start(model, x, seed=0):
    """Parameters, from NumPy: JAX would compile every operation that draws them."""
    random = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(0.5 * random.standard_normal(leaf.shape), leaf.dtype)
    return jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0), x))


def training(model, optimizer, x):
    """Parameters, optimizer state, and a plain update function."""
    params = start(model, x, seed=1)

    def loss(params, x):
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    def update(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    return params, optimizer.init(params), update


def key(o):
    return o.kind, o.name, o.part, o.call


def found(observations):
    return {key(o): o.resolve() for o in observations}


def assert_same(tree, other):
    a, b = jax.tree.leaves(tree), jax.tree.leaves(other)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def assert_agrees(summary, array, tolerance=1e-5, same_program=True):
    """Another program computes the same array, but XLA may round its last bits differently."""
    want = tap.summarize(np.asarray(array))
    for name in ("count", "zeros", "nans", "posinfs", "neginfs"):
        assert getattr(summary, name) == getattr(want, name), name
    for name in ("min", "max"):
        value = getattr(want, name)
        assert getattr(summary, name) == (
            value if same_program else pytest.approx(value, rel=1e-6)
        ), name
    if same_program:
        assert summary.exponents == want.exponents
    for name in ("std", "mean_abs", "max_abs", "min_abs", "rm2", "rm4", "rm8"):
        assert getattr(summary, name) == pytest.approx(getattr(want, name), rel=tolerance), name
    assert summary.mean == pytest.approx(want.mean, abs=tolerance * want.mean_abs)


# -- linen -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("jitted", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_activations_and_their_gradients(jitted, dtype):
    model, x = MLP(dtype), batch()
    params, state, update = training(model, optax.sgd(1e-2, momentum=0.9), x)
    fn = jax.jit(update) if jitted else update
    intercept = Intercept()
    results, seen = intercept(fn, params, state, x)
    assert_same(results, fn(params, state, x))
    assert intercept.unseen == []
    names = ["Dense_0", "Dense_1", "MLP"]
    assert sorted(map(key, seen)) == sorted((k, n, "", 0) for k in (ACT, GRAD) for n in names)
    assert {o.type for o in seen if o.name == "Dense_0"} == {"flax.linen.linear.Dense"}
    assert {(o.dtype, o.shape) for o in seen if o.name == "Dense_0"} == {(dtype, (5, 8))}

    summaries = found(seen)
    _, inner = model.apply(params, x, capture_intermediates=True)
    inner = inner["intermediates"]
    assert_agrees(summaries[ACT, "Dense_0", "", 0], inner["Dense_0"]["__call__"][0])
    output = inner["__call__"][0]
    assert_agrees(summaries[ACT, "MLP", "", 0], output)
    square = lambda y: jnp.mean(y.astype(jnp.float32) ** 2)
    assert_agrees(summaries[GRAD, "MLP", "", 0], jax.grad(square)(output))
    assert_agrees(summaries[GRAD, "Dense_1", "", 0], jax.grad(square)(output))


def test_a_function_that_was_compiled_before_keeps_its_code():
    traced = []
    params, state, update = training(MLP(), optax.sgd(1e-2), x := batch())

    @jax.jit
    def step(*args):
        traced.append(1)
        return update(*args)

    step(params, state, x)
    assert len(traced) == 1
    intercept = Intercept()
    for _ in range(3):
        results, seen = intercept(step, params, state, x)
        assert len(seen) == 6
    assert_same(results, step(params, state, x))
    assert len(traced) == 2  # once more, for the tracker
    intercept(step, params, state, batch((7, 4)))
    step(params, state, x)
    assert len(traced) == 4  # another shape: with statistics, and the plain one to compare


@pytest.mark.parametrize(
    ("jitted", "dtype"), [(True, "float32"), (True, "bfloat16"), (False, "float32")]
)
def test_ten_steps_are_the_same_to_the_last_bit(jitted, dtype):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm(dtype=dtype)(x)
            if attention:
                h = nn.MultiHeadDotProductAttention(num_heads=2, dtype=dtype)(h)
            x = x + nn.gelu(nn.Dense(16, dtype=dtype)(h))
            return nn.Dense(5 if jitted else 16, dtype=dtype)(x)

    # compiling is what takes long: without jit that of each operation on each shape
    attention = jitted and dtype == "float32"
    x = batch((3, 6, 16))
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    params, state, update = training(Model(), chain, x)
    fn = jax.jit(update) if jitted else update
    plain = ours = (params, state)
    intercept = Intercept()
    for _ in range(10 if jitted else 2):
        plain = fn(*plain, x)[:2]
        results, seen = intercept(fn, *ours, x)
        ours = results[:2]
        intercept.observe_trees(results[0], results[1], results[2])
        assert len(seen) == (18 if attention else 8)
    assert_same(plain, ours)


def test_a_shared_module_has_a_number_for_each_call():
    model, x = Shared(), batch()
    params, state, update = training(model, optax.sgd(0.1), x)
    dense = lambda v: nn.Dense(4).apply({"params": params["params"]["dense"]}, v)
    for fn in (update, jax.jit(update)):
        _, seen = Intercept()(fn, params, state, x)
        summaries = found(seen)
        assert {k[3] for k in summaries if k[1] == "dense"} == {0, 1, 2}
        y = model.apply(params, x)
        assert_agrees(summaries[ACT, "dense", "", 2], y)
        gradient = jax.grad(lambda y: jnp.mean(y**2))(y)
        assert_agrees(summaries[GRAD, "dense", "", 2], gradient)
        assert_agrees(summaries[ACT, "dense", "", 0], dense(x))
        rest = lambda h: jnp.mean(dense(jnp.tanh(dense(h))) ** 2)
        gradient = jax.grad(rest)(dense(x))
        assert_agrees(summaries[GRAD, "dense", "", 0], gradient, 1e-4, same_program=False)


@pytest.mark.parametrize("jitted", [True, False])
def test_outputs_of_several_parts(jitted):
    x = batch()
    fn = lambda x: Pair().apply({}, x)
    fn = jax.jit(fn) if jitted else fn
    results, seen = Intercept()(fn, x)
    assert results["c"] is None
    assert results["d"] == 5
    summaries = found(seen)
    assert set(summaries) == {(ACT, "Pair", part, 0) for part in ("a", "b.0", "b.1")}
    assert_agrees(summaries[ACT, "Pair", "a", 0], x * 2)
    assert_agrees(summaries[ACT, "Pair", "b.1", 0], jnp.arange(3))


def test_only_what_is_wanted_is_seen():
    params, state, update = training(MLP(), optax.sgd(0.1), x := batch())
    for fn in (update, jax.jit(update)):
        wanted = lambda kind, name: kind is GRAD and name == "Dense_0"
        _, seen = Intercept(wanted)(fn, params, state, x)
        assert list(map(key, seen)) == [(GRAD, "Dense_0", "", 0)]


def test_other_methods_go_by_their_name():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(7, 4)
            return embed.attend(embed(tokens))

    model, tokens = Tied(), jnp.array([1, 2])
    params = start(model, tokens)
    _, seen = Intercept()(jax.jit(model.apply), params, tokens)
    assert [o.name for o in seen] == ["Embed_0", "Embed_0.attend", "Tied"]


# -- transformations -------------------------------------------------------------------------


def test_scan_gives_a_call_for_each_iteration():
    dense, x = nn.Dense(4), batch((3, 4))
    params = start(dense, x)

    def loss(params, x):
        def body(carry, _):
            carry = jnp.tanh(dense.apply(params, carry))
            return carry, None

        return jnp.sum(jax.lax.scan(body, x, None, length=4)[0])

    for fn in (jax.grad(loss), jax.jit(jax.grad(loss))):
        intercept = Intercept()
        results, seen = intercept(fn, params, x)
        assert_same(results, fn(params, x))
        summaries = found(seen)
        assert sorted(summaries) == sorted(
            (k, "Dense", "", i) for k in (ACT, GRAD) for i in range(4)
        )
        h = x
        for i in range(4):
            y = dense.apply(params, h)
            assert_agrees(summaries[ACT, "Dense", "", i], y, same_program=False)
            h = jnp.tanh(y)
        last = jax.grad(lambda y: jnp.sum(jnp.tanh(y)))(y)
        assert_agrees(summaries[GRAD, "Dense", "", 3], last, same_program=False)


@pytest.mark.parametrize("jitted", [True, False])
def test_remat_is_not_counted_twice(jitted):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.remat(MLP)(name="block")(x))

    params, state, update = training(Model(), optax.sgd(0.1), x := batch())
    fn = jax.jit(update) if jitted else update
    results, seen = Intercept()(fn, params, state, x)
    assert_same(results, fn(params, state, x))
    names = {"block.Dense_0", "block.Dense_1", "block", "Dense_0", "Model"}
    assert set(map(key, seen)) == {(k, n, "", 0) for k in (ACT, GRAD) for n in names}
    assert len(seen) == 2 * len(names)


@pytest.mark.parametrize("jitted", [True, False])
def test_vmap_is_seen_as_one_batch(jitted):
    model, x = MLP(), batch()
    params = start(model, x[0])
    fn = jax.vmap(lambda x: model.apply(params, x))
    fn = jax.jit(fn) if jitted else fn
    results, seen = Intercept()(fn, x)
    summaries = found(seen)
    assert set(summaries) == {(ACT, n, "", 0) for n in ("Dense_0", "Dense_1", "MLP")}
    assert_agrees(summaries[ACT, "MLP", "", 0], results)


@pytest.mark.parametrize("outer", [True, False])
def test_an_inner_jit_that_was_compiled_before(outer):
    model, x = MLP(), batch()
    params = start(model, x)
    inner = jax.jit(jax.value_and_grad(lambda params, x: jnp.sum(model.apply(params, x) ** 2)))
    inner(params, x)

    def fn(params, x):
        value, grads = inner(params, x)
        other, _ = inner(params, x + 1)
        return value + other, grads

    fn = jax.jit(fn) if outer else fn
    intercept = Intercept()
    for _ in range(2):
        results, seen = intercept(fn, params, x)
        assert_same(results, fn(params, x))
        summaries = found(seen)
        assert len(summaries) == len(seen) == 12
        assert_agrees(summaries[ACT, "MLP", "", 0], model.apply(params, x))
        assert_agrees(summaries[ACT, "MLP", "", 1], model.apply(params, x + 1))
        assert_agrees(summaries[GRAD, "MLP", "", 0], 2 * model.apply(params, x))
        assert_agrees(summaries[GRAD, "MLP", "", 1], 2 * model.apply(params, x + 1))


def test_both_branches_of_a_cond():
    model, x = MLP(), batch()
    params = start(model, x)

    @jax.jit
    def fn(flag, x):
        run = lambda x: model.apply(params, x)
        return jax.lax.cond(flag, lambda x: run(x * 2), lambda x: run(x)[:, ::-1], x)

    intercept = Intercept()
    for flag, want in ((True, x * 2), (False, x)):
        _, seen = intercept(fn, flag, x)
        taken = [o.resolve() for o in seen if o.name == "MLP" and o.resolve() is not None]
        assert len(taken) == 1
        assert_agrees(taken[0], model.apply(params, want))


@pytest.mark.parametrize("jitted", [True, False])
def test_a_while_loop_calls_back(jitted):
    dense, x = nn.Dense(4), batch()
    params = start(dense, x)

    def fn(x):
        return jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(dense.apply(params, c[1]))), (0, x)
        )[1]

    fn = jax.jit(fn) if jitted else fn
    results, seen = Intercept()(fn, x)
    assert_same(results, fn(x))
    summaries = found(seen)
    assert set(summaries) == {(ACT, "Dense", "", i) for i in range(3)}
    assert_agrees(summaries[ACT, "Dense", "", 0], dense.apply(params, x))


def test_forward_mode_works():
    model, x = MLP(), batch()
    params = start(model, x)
    fn = jax.jit(lambda x: jax.jvp(lambda x: model.apply(params, x), (x,), (x,)))
    results, seen = Intercept()(fn, x)
    assert_same(results, fn(x))
    assert [o.name for o in seen] == ["Dense_0", "Dense_1", "MLP"]


def test_lifted_scan_over_layers():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(4)(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(nn.remat(Block), variable_axes={"params": 0},
                             split_rngs={"params": True}, length=3)  # fmt: skip
            return layers(name="layers")(x, None)[0]

    params, state, update = training(Model(), optax.sgd(0.1), x := batch())
    fn = jax.jit(update)
    results, seen = Intercept()(fn, params, state, x)
    assert_same(results, fn(params, state, x))
    summaries = found(seen)
    assert {k[3] for k in summaries if k[:2] == (ACT, "layers.Dense_0")} == {0, 1, 2}
    assert {k[3] for k in summaries if k[:2] == (GRAD, "layers.Dense_0")} == {0, 1, 2}


# -- how functions are given -----------------------------------------------------------------


def test_arguments_that_are_no_arrays():
    model, optimizer, x = MLP(), optax.sgd(1e-2, momentum=0.9), batch()
    params, state, _ = training(model, optimizer, x)

    def update(params, state, optimizer, x, scale=1.0, *, mode="mean"):
        reduce = {"mean": jnp.mean, "sum": jnp.sum}[mode]
        grads = jax.grad(lambda p: reduce(model.apply(p, x) ** 2) * scale)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    jitted = jax.jit(update, static_argnums=2, static_argnames=("mode",))
    for fn in (update, jitted, functools.partial(jitted, mode="sum")):
        intercept = Intercept()
        results, seen = intercept(fn, params, state, optimizer, x, 2.0)
        assert_same(results, fn(params, state, optimizer, x, 2.0))
        assert len(seen) == 6
        assert intercept.unseen == []
    results, _ = intercept(jitted, params, state, optimizer, x, scale=3, mode="sum")
    assert_same(results, jitted(params, state, optimizer, x, scale=3, mode="sum"))


def test_a_method_that_is_jitted():
    class Trainer:
        def __init__(self):
            self.model = MLP()

        @functools.partial(jax.jit, static_argnums=0)
        def step(self, params, x):
            return jax.grad(lambda p: jnp.sum(self.model.apply(p, x)))(params)

    trainer, x = Trainer(), batch()
    params = start(trainer.model, x)
    results, seen = Intercept()(trainer.step, params, x)
    assert_same(results, trainer.step(params, x))
    assert len(seen) == 6


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
    assert intercept.unseen == []
    assert_same(ours, want)


def test_shardings_are_kept():
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    where = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec("x"))
    model, x = MLP(), batch()
    params = start(model, x)
    fn = jax.jit(lambda x: model.apply(params, x), in_shardings=where, out_shardings=where)
    results, seen = Intercept()(fn, x)
    assert results.sharding == fn(x).sharding
    assert len(seen) == 3


def test_the_users_exception_is_the_users():
    @jax.jit
    def broken(x):
        Pair().apply({}, x)
        raise KeyError("mine")

    for fn in (broken, broken.__wrapped__):
        with pytest.raises(KeyError, match="mine"):
            Intercept()(fn, batch())


def test_what_rounds_differently_runs_twice(monkeypatch):
    from tensortap.frameworks.jax import compiled as jax_compiled

    params, state, update = training(MLP(), optax.sgd(0.1), x := batch())
    monkeypatch.setattr(jax_compiled, "identical", lambda a, b: False)
    for fn in (jax.jit(update), jax.jit(update, donate_argnums=(0,))):
        intercept = Intercept()
        want = fn(jax.tree.map(jnp.copy, params), state, x)
        for _ in range(3):
            results, seen = intercept(fn, jax.tree.map(jnp.copy, params), state, x)
            assert_same(results, want)
            assert len(seen) == 6
        assert len(intercept.unseen) == 1
        assert "rounds differently" in intercept.unseen[0]


def test_an_array_that_cannot_be_reduced_is_said():
    class Keys(nn.Module):
        def __call__(self, x):
            return x, jax.random.key(0)

    _, seen = Intercept()(jax.jit(lambda x: Keys().apply({}, x)), batch())
    assert [o.part for o in seen] == ["0"]


def test_without_the_extension(monkeypatch):
    from tensortap.frameworks.jax import device_stats as jax_stats

    monkeypatch.setattr(jax_stats, "native", lambda: False)
    model, x = MLP("bfloat16"), batch()
    params = start(model, x)
    fn = jax.jit(lambda x: jnp.sum(model.apply(params, x)))
    intercept = Intercept(lambda kind, name: name == "MLP")
    _, seen = intercept(jax.grad(fn), x)  # grad around a jitted function: it calls back
    assert sorted(o.kind for o in seen) == [ACT, GRAD]
    _, seen = intercept(fn, x)
    assert_agrees(seen[0].resolve(), model.apply(params, x))


# -- nnx and equinox -------------------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs), Layer(rngs)]) if hasattr(nnx, "List") else [
            Layer(rngs), Layer(rngs)]  # fmt: skip
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


NEW_NNX = "model" in inspect.signature(nnx.Optimizer.update).parameters
NNX = {"Net", "head", "layers.0", "layers.0.linear", "layers.1", "layers.1.linear"}


@pytest.mark.parametrize("jitted", [True, False])
def test_nnx_in_the_functional_style(jitted):
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    x = batch()

    def update(params, x):
        grads = jax.grad(lambda p: jnp.mean(nnx.merge(graph, p)(x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), grads

    fn = jax.jit(update) if jitted else update
    results, seen = Intercept()(fn, params, x)
    assert_same(results, fn(params, x))
    summaries = found(seen)
    assert set(summaries) == {(k, n, "", 0) for k in (ACT, GRAD) for n in NNX}
    assert_agrees(summaries[ACT, "Net", "", 0], nnx.merge(graph, params)(x))
    assert Net.__call__.__name__ == "__call__"
    assert not hasattr(Net.__call__, "__wrapped__")


def test_nnx_jit_and_its_optimizer():
    x = batch()

    @nnx.jit
    def update(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        # before Flax 0.11 the optimizer held the model
        optimizer.update(*((model, grads) if NEW_NNX else (grads,)))
        return grads

    def start():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    model, optimizer = start()
    ours, our_optimizer = start()
    intercept = Intercept()
    for _ in range(3):
        grads = update(model, optimizer, x)
        our_grads, seen = intercept(update, ours, our_optimizer, x)
        assert set(map(key, seen)) == {(k, n, "", 0) for k in (ACT, GRAD) for n in NNX}
    assert intercept.unseen == []
    assert_same(nnx.state(model), nnx.state(ours))
    assert_same(grads, our_grads)
    trees = intercept.observe_trees(nnx.state(ours, nnx.Param), nnx.state(our_optimizer), our_grads)
    weights = {o.name for o in trees if o.kind is Kind.WEIGHT}
    assert "layers.0.linear.kernel" in weights
    assert weights == {o.name for o in trees if o.kind is Kind.WEIGHT_GRADIENT}
    mu = {o.name for o in trees if o.kind is Kind.OPTIMISER_STATE and o.part == "mu"}
    assert mu == weights


def test_equinox_runs_as_it_would():
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    x = batch()

    @eqx.filter_jit
    def update(model, x):
        return eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)

    intercept = Intercept()
    results, seen = intercept(update, model, x)
    assert_same(eqx.filter(results, eqx.is_array), eqx.filter(update(model, x), eqx.is_array))
    assert seen == []
    names = {o.name for o in intercept.observe_trees(model, None, results)}
    assert names == {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"}


# -- trees -----------------------------------------------------------------------------------


def test_weights_gradients_and_optimizer_state():
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.multi_transform(
            {"a": optax.adamw(1e-3), "b": optax.sgd(0.1, momentum=0.9)},
            lambda params: jax.tree_util.tree_map_with_path(
                lambda path, _: "a" if "Dense_0" in jax.tree_util.keystr(path) else "b", params
            ),
        ),
    )
    params, state, update = training(MLP(), optimizer, x := batch())
    params, state, grads = jax.jit(update)(params, state, x)
    seen = Intercept().observe_trees(params, state, grads)
    summaries = found(seen)
    leaves = ["Dense_0.bias", "Dense_0.kernel", "Dense_1.bias", "Dense_1.kernel"]
    for kind, tree in ((Kind.WEIGHT, params), (Kind.WEIGHT_GRADIENT, grads)):
        assert sorted(k[1] for k in summaries if k[0] is kind) == leaves
        kernel = tree["params"]["Dense_0"]["kernel"]
        assert_agrees(summaries[kind, "Dense_0.kernel", "", 0], kernel)
    entries = {k[1:3] for k in summaries if k[0] is Kind.OPTIMISER_STATE}
    per_parameter = {e for e in entries if not e[0].startswith("optimizer")}
    assert per_parameter == {
        *((f"Dense_0.{p}", key) for p in ("bias", "kernel") for key in ("mu", "nu")),
        *((f"Dense_1.{p}", "trace") for p in ("bias", "kernel")),
    }
    assert {key for name, key in entries if name.startswith("optimizer")} == {"count"}
    count = next(o for o in seen if o.part == "count")
    assert (count.dtype, count.shape, count.resolve().max) == ("int32", (), 1.0)
    mu = state[1].inner_states["a"].inner_state[0].mu["params"]["Dense_0"]["kernel"]
    assert_agrees(summaries[Kind.OPTIMISER_STATE, "Dense_0.kernel", "mu", 0], mu)


def test_the_optimizer_was_made_for_part_of_the_parameters():
    params = {"params": {"a": {"w": jnp.ones(3)}}, "batch_stats": {"n": {"mean": jnp.ones(2)}}}
    state = optax.adafactor(1e-3).init(params["params"])
    seen = Intercept().observe_trees(params, state)
    names = {(o.kind, o.name, o.part) for o in seen}
    assert (Kind.WEIGHT, "a.w", "") in names
    assert (Kind.WEIGHT, "batch_stats.n.mean", "") in names
    assert (Kind.OPTIMISER_STATE, "a.w", "v") in names
    # only the state, named after parameters that are known from before
    names = {(o.name, o.part) for o in Intercept().observe_trees(None, state, like=params)}
    assert ("a.w", "v_row") in names


def test_what_was_donated_is_left_out():
    kept, gone = jnp.ones(3), jnp.ones(3)
    gone.delete()
    with jax.transfer_guard("disallow"):
        seen = Intercept().observe_trees({"kept": kept, "gone": gone, "number": 1.0})
    assert [o.name for o in seen] == ["kept", "number"]


def test_plain_numbers_and_nothing():
    assert Intercept().observe_trees() == []
    seen = Intercept().observe_trees({"w": 2.0, "name": "x", "f": len, "n": np.arange(3)})
    assert {(o.name, o.dtype, o.resolve().max) for o in seen} == {
        ("w", "float32", 2.0), ("n", "int32", 2.0),
    }  # fmt: skip


def test_states_are_kept_whole_and_stashed_where_that_is_wanted():
    optimizer = optax.adam(1e-3)
    params, state, update = training(MLP(), optimizer, x := batch())
    options = {"tensors": "Dense_0.kernel", "stash": lambda a: {"first": float(a.ravel()[0])}}
    with tap.track(model_state=params, optimizer_state=state, **options) as tracker:
        params, state, grads = tracker.intercept(jax.jit(update), params, state, x)
        with jax.transfer_guard("disallow"):
            tracker.step(params, state, grads)
    records = {(r.kind, r.name): r for r in tracker.records}
    for kind, name, tree in (
        (Kind.WEIGHT, "Dense_0.kernel", params),
        (Kind.WEIGHT_GRADIENT, "Dense_0.kernel", grads),
        (Kind.OPTIMISER_STATE, "Dense_0.kernel.mu", state[0].mu),
    ):
        kernel = tree["params"]["Dense_0"]["kernel"]
        kept = rebuild(value_of(records[kind, name]))
        assert isinstance(kept, jax.Array)
        assert_same(kept, kernel)
        assert dict(records[kind, name].value.items)["first"] == kernel.ravel()[0]
    bias = records[Kind.WEIGHT, "Dense_1.bias"]
    assert dict(bias.value.items) == {"first": params["params"]["Dense_1"]["bias"][0]}
    assert "states only" in tracker.unseen["inside compiled functions"]
