import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import tensortap as tap

model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(1)])
x = jax.random.normal(jax.random.key(2), (256, 5))
y = x[:, :1] * x[:, 1:2]
params = model.init(jax.random.key(0), x)
opt = optax.adam(3e-3)
opt_state = opt.init(params)


@jax.jit
def update(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x) - y) ** 2))(params)
    updates, opt_state = opt.update(grads, opt_state, params)
    optax.apply_updates(params, updates)
    return params, opt_state, grads, loss


with tap.track(params, opt_state, alerts=True, to="runs") as tracker:
    for step in range(40):
        i = (jnp.arange(32) + 32 * step) % 256
        params, opt_state, grads, loss = tracker.intercept(update, params, opt_state, x[i], y[i])
        tracker.step(params, opt_state, grads, loss=loss)
print(f"loss {float(loss):.4f}")
