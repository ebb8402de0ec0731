"""Observation of parameter, gradient and optimizer-state trees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tensortap as tap
from tensortap.core.record import Kind
from tensortap.rooms.track.jax.track import observe_trees
from tensortap.runs.reader import value_of
from tensortap.values import rebuild
from tests.track.jax.programs import (
    MLP,
    assert_agrees,
    assert_same,
    batch,
    everything,
    names_of,
    observed,
    summaries_of,
    training,
)


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
    params, state, _ = training(MLP(), optimizer, batch())
    grads = jax.tree.map(np.negative, params)
    seen = observe_trees(everything, params, state, grads)
    summaries = summaries_of(seen)
    leaves = ["Dense_0.bias", "Dense_0.kernel", "Dense_1.bias", "Dense_1.kernel"]
    for kind, tree in ((Kind.WEIGHT, params), (Kind.WEIGHT_GRADIENT, grads)):
        assert sorted(k[1] for k in summaries if k[0] is kind) == leaves
        kernel = tree["params"]["Dense_0"]["kernel"]
        assert_agrees(summaries[kind, "Dense_0.kernel", 0], kernel)
    tags = [o.tags for o in observed(seen) if o.kind is Kind.OPTIMISER_STATE]
    entries = {(each["parameter"], each["state"]) for each in tags}
    per_parameter = {e for e in entries if not e[0].startswith("optimizer")}
    assert per_parameter == {
        *((f"Dense_0.{p}", key) for p in ("bias", "kernel") for key in ("mu", "nu")),
        *((f"Dense_1.{p}", "trace") for p in ("bias", "kernel")),
    }
    assert {key for name, key in entries if name.startswith("optimizer")} == {"count"}
    count = next(o for o in seen if o.observed.tags.get("state") == "count")
    assert (count.observed.dtype, count.observed.shape) == ("int32", ())
    assert count.pending.resolve().max == 0.0
    mu = state[1].inner_states["a"].inner_state[0].mu["params"]["Dense_0"]["kernel"]
    assert_agrees(summaries[Kind.OPTIMISER_STATE, "Dense_0.kernel.mu", 0], mu)


@pytest.mark.slow
def test_optimizer_for_part_of_the_parameters():
    params = {"params": {"a": {"w": jnp.ones(3)}}, "batch_stats": {"n": {"mean": jnp.ones(2)}}}
    state = optax.adafactor(1e-3).init(params["params"])
    seen = observe_trees(everything, params, state)
    names = {(o.kind, o.name) for o in observed(seen)}
    assert (Kind.WEIGHT, "a.w") in names
    assert (Kind.WEIGHT, "batch_stats.n.mean") in names
    assert (Kind.OPTIMISER_STATE, "a.w.v") in names
    # only the state, named after known parameters
    assert "a.w.v_row" in names_of(observe_trees(everything, None, state, like=params))


def test_the_receipt_counts_them():
    before = tap.receipt()
    with tap.track({"w": jnp.ones(3), "b": jnp.ones(2)}) as tracker:
        tracker.step({"w": jnp.ones(3), "b": jnp.ones(2)})
    found = tap.receipt().since(before)
    assert found.tracked == 4
    assert found.seconds > 0


def test_leaves_out_donated_arrays():
    kept, gone = jnp.ones(3), jnp.ones(3)
    gone.delete()
    with jax.transfer_guard("disallow"):
        seen = observe_trees(everything, {"kept": kept, "gone": gone, "number": 1.0})
    assert names_of(seen) == ["kept", "number"]


@pytest.mark.slow
def test_plain_numbers_and_empty_trees():
    assert observe_trees(everything) == []
    seen = observe_trees(everything, {"w": 2.0, "name": "x", "f": len, "n": np.arange(3)})
    assert {(o.observed.name, o.observed.dtype, o.pending.resolve().max) for o in seen} == {
        ("w", "float32", 2.0), ("n", "int32", 2.0),
    }  # fmt: skip


@pytest.mark.slow
def test_tracker_keeps_and_stashes_states():
    params, state, update = training(MLP(), optax.sgd(1e-3, momentum=0.9), x := batch())
    options = {"tensors": "Dense_0.kernel", "stash": lambda a: {"first": float(a.ravel()[0])}}
    with tap.track(params, state, **options) as tracker:
        params, state, grads = tracker.intercept(jax.jit(update), params, state, x)
        with jax.transfer_guard("disallow"):
            tracker.step(params, state, grads)
    records = {(r.kind, r.name): r for r in tracker.records}
    for kind, name, tree in (
        (Kind.WEIGHT, "Dense_0.kernel", params),
        (Kind.WEIGHT_GRADIENT, "Dense_0.kernel", grads),
        (Kind.OPTIMISER_STATE, "Dense_0.kernel.trace", state[0].trace),
    ):
        kernel = tree["params"]["Dense_0"]["kernel"]
        kept = rebuild(value_of(records[kind, name]))
        assert isinstance(kept, jax.Array)
        assert_same(kept, kernel)
        assert dict(records[kind, name].value.items)["first"] == kernel.ravel()[0]
    bias = records[Kind.WEIGHT, "Dense_1.bias"]
    assert dict(bias.value.items) == {"first": params["params"]["Dense_1"]["bias"][0]}
    assert "states only" in tracker.unseen["inside compiled functions"]


def test_steps_are_not_analyzed():
    with pytest.raises(ValueError, match="analyses need a torch model"):
        tap.track({"w": jnp.ones(3)}, analyses=["norms"])


def test_the_first_tensor_that_is_not_finite_is_blamed():
    params = {"w": jnp.ones((4, 3))}

    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.sqrt(0 * x @ p["w"]).sum())(params)
        return optax.apply_updates(params, grads), grads, loss

    with tap.track(params, alerts=True) as tracker:
        for _ in range(3):
            params, grads, loss = step(params, jnp.ones((2, 4)))
            tracker.step(params, grads=grads, loss=loss)
    (alert,) = [each for each in tracker.alerts if each.rule == "nan"]
    assert (alert.kind, alert.step) == (Kind.WEIGHT_GRADIENT, 0)
    assert "no output before it in this step was observed" in alert.message
    assert not np.isfinite(np.asarray(params["w"])).any()


@pytest.mark.parametrize("budget", [False, "5%"])
def test_a_part_of_the_weights_that_is_not_kept_after_the_update(budget):
    w, optimizer = jnp.full((3, 2), 0.5), optax.sgd(0.01)
    params, x = {"kept": {"w": w}, "lost": {"w": w.T}}, jnp.ones((4, 3))
    state = optimizer.init(params)

    def loss_of(params):
        return jnp.square(x @ params["kept"]["w"] @ params["lost"]["w"]).mean()

    with tap.track(params, state, alerts=True, budget=budget) as tracker:
        for _ in range(60):
            grads = jax.grad(loss_of)(params)
            updates, state = optimizer.update(grads, state)
            params = optax.apply_updates(params, updates) | {"lost": params["lost"]}
            tracker.step(params, state, grads)
    found = [(alert.rule, alert.name) for alert in tracker.alerts]
    assert found == [("never_changes", "lost.w")]
