import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import tensortap as tap


class AutoEncoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        code = nn.Dense(4)(nn.relu(nn.Dense(24)(x)))
        return nn.Dense(16)(nn.relu(nn.Dense(24)(code)))


model, opt = AutoEncoder(), optax.adam(5e-3)
x = jax.random.normal(jax.random.key(1), (256, 4)) @ jax.random.normal(jax.random.key(2), (4, 16))
params = model.init(jax.random.key(0), x)
opt_state = opt.init(params)


@jax.jit
def update(params, opt_state, x, key):
    noisy = x + 0.1 * jax.random.normal(key, x.shape)
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, noisy) - x) ** 2))(params)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, grads, loss


with tap.track(params, opt_state, alerts=True, to="runs") as tracker:
    for step in range(40):
        batch = x[(jnp.arange(32) + 32 * step) % 256]
        params, opt_state, grads, loss = tracker.intercept(
            update, params, opt_state, batch, jax.random.key(step)
        )
        tracker.step(params, opt_state, grads, loss=loss)
print(f"loss {float(loss):.4f}")
