"""Where values that are not finite arise: in a module, or in the code between two modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import tensortap as tap
from tensortap import alerts
from tensortap.record import Kind
from tests.frameworks.jax.programs import batch, parameters

pytestmark = pytest.mark.usefixtures("no_errors")


@jax.custom_vjp
def bad_backward(x):
    return x


bad_backward.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.nan,))


class Attn(nn.Module):
    fault: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="q")(x)
        if self.fault == "between":
            x = x * (x * 0) / (x * 0)
        if self.fault == "backward":
            x = bad_backward(x)
        x = nn.Dense(4, name="o_proj")(x)
        return x / 0 if self.fault == "after" else x


class Layer(nn.Module):
    fault: str

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm")(x)
        if self.fault == "outside":
            h = h * jnp.inf
        return x + Attn(self.fault, name="attn")(h)


class Loop(nn.Module):
    """Calls its layer three times; its input becomes NaN in the second call."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4, name="layer")

        def body(layer, carry, n):
            return layer(jnp.where(n == 1, jnp.nan, carry)), None

        options = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        return nn.scan(body, **options)(layer, x, jnp.arange(3))[0]


def first_alert(model, x, jit=jax.jit, backward=False):
    params = parameters(model, batch((3, 4)))
    function = lambda params, x: jnp.mean(model.apply(params, x) ** 2)
    function = jit(jax.grad(function) if backward else function)
    with tap.track(model_state=params, alerts=[alerts.nan(), alerts.inf()]) as tracker:
        tracker.intercept(function, params, x)
        tracker.step()
    records = [r for r in tracker.records if r.kind is not Kind.ALERT]
    assert not [r.name for r in records if "input" in r.name]  # inputs make no records
    return tracker.alerts[0]


@pytest.mark.parametrize(
    ("fault", "name", "origin", "where"),
    [
        ("between", "attn.o_proj", "attn", "between attn.q and attn.o_proj"),
        ("after", "attn", "attn", "made in Attn.__call__, after attn.o_proj"),
        ("outside", "attn.q", "Layer", "between norm and attn"),
    ],
)  # fmt: skip
def test_code_between_modules_is_named_as_the_origin(fault, name, origin, where):
    first = first_alert(Layer(fault), batch((3, 4)))
    assert (first.name, first.origin) == (name, origin)
    assert where in first.message
    if fault == "between":
        assert "made in Attn.__call__ (test_origins.py:" in first.message


@pytest.mark.slow
def test_a_bad_batch_and_a_bad_backward_pass_are_told():
    first = first_alert(Layer(""), batch((3, 4)) * jnp.nan)
    assert (first.name, first.origin) == ("norm", "Layer")
    assert "the input of Layer was NaN: check the batch" in first.message
    first = first_alert(Layer("backward"), batch((3, 4)), backward=True)
    assert (first.name, first.kind, first.origin) == ("attn.q", Kind.GRADIENT, "attn")
    assert "the code in attn, between attn.q and attn.o_proj" in first.message


@pytest.mark.slow
def test_origin_in_a_loop_and_without_jit():
    first = first_alert(Loop(), batch((3, 4)))
    assert (first.name, first.call) == ("layer", 1)
    assert "made in Loop.__call__.<locals>.body (test_origins.py" in first.message
    first = first_alert(Layer("between"), batch((3, 4)), jit=lambda function: function)
    assert (first.name, first.origin) == ("attn.o_proj", "attn")
    assert "between attn.q and attn.o_proj" in first.message


@pytest.mark.slow
@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_origin_among_modules_of_other_libraries(library):
    x = batch((3, 4))
    if library == "nnx":
        from flax import nnx

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

            def __call__(self, x):
                return self.b(jnp.log(-jnp.abs(self.a(x))))

        model = Net(nnx.Rngs(0))
    else:
        import equinox as eqx

        class Net(eqx.Module):
            a: eqx.nn.Linear
            b: eqx.nn.Linear

            def __call__(self, x):
                return self.b(jnp.log(-jnp.abs(self.a(x))))

        model = Net(*(eqx.nn.Linear(4, 4, key=jax.random.key(n)) for n in range(2)))
        x = x[0]
    with tap.track(model_state={"w": x}, alerts=True) as tracker:
        tracker.intercept(jax.jit(lambda x: model(x)), x)
        tracker.step()
    first = tracker.alerts[0]
    assert (first.name, first.origin) == ("b", "Net")
    assert "made in" in first.message
    assert "between a and b" in first.message
