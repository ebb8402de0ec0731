import jax
import jax.numpy as jnp
import optax

import tensortap as tap

k1, k2, k3 = jax.random.split(jax.random.key(1), 3)
x = jax.random.normal(k1, (256, 6))
y = jnp.sin(x[:, :1]) * x[:, 1:2]
params = {"l1": jax.random.normal(k2, (6, 32)) * 0.4, "l2": jax.random.normal(k3, (32, 1)) * 0.2}
opt = optax.adam(3e-3)
opt_state = opt.init(params)


@jax.jit
def update(params, opt_state, x, y):
    def loss_fn(p):
        features = jax.lax.stop_gradient(jnp.tanh(x @ p["l1"]))
        return jnp.mean((features @ p["l2"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, grads, loss


with tap.track(params, opt_state, alerts=True, to="runs") as tracker:
    for step in range(40):
        i = (jnp.arange(32) + 32 * step) % 256
        params, opt_state, grads, loss = tracker.intercept(update, params, opt_state, x[i], y[i])
        tracker.step(params, opt_state, grads, loss=loss)
print(f"loss {float(loss):.4f}")
