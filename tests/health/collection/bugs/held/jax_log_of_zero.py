import jax
import jax.numpy as jnp
import optax

import tensortap as tap

key = jax.random.key(0)
x = 60 * jax.random.normal(key, (256, 8))
y = (x[:, 0] > 0).astype(int)
params = {"w1": jax.random.normal(key, (8, 32)) * 0.3, "w2": jax.random.normal(key, (32, 2)) * 0.3}
opt = optax.sgd(0.1)
opt_state = opt.init(params)


@jax.jit
def update(params, opt_state, x, y):
    def loss_fn(p):
        probs = jax.nn.softmax(jax.nn.relu(x @ p["w1"]) @ p["w2"])
        return -jnp.log(probs[jnp.arange(len(y)), y]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, grads, loss


with tap.track(params, opt_state, alerts=True, to="runs") as tracker:
    for step in range(30):
        i = (jnp.arange(32) + 32 * step) % 256
        params, opt_state, grads, loss = tracker.intercept(update, params, opt_state, x[i], y[i])
        tracker.step(params, opt_state, grads, loss=loss)
print("loss", float(loss))
