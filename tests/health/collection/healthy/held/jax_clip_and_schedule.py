import jax
import jax.numpy as jnp
import optax

import tensortap as tap

k1, k2, k3, k4 = jax.random.split(jax.random.key(3), 4)
x = jax.random.normal(k1, (320, 8))
y = jnp.argmax(x @ jax.random.normal(k4, (8, 3)), axis=1)
params = {
    "l1": {"w": jax.random.normal(k2, (8, 32)) * 0.35, "b": jnp.zeros(32)},
    "l2": {"w": jax.random.normal(k3, (32, 3)) * 0.2, "b": jnp.zeros(3)},
}
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 50)
opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
opt_state = opt.init(params)


@jax.jit
def update(params, opt_state, x, y):
    def loss_fn(p):
        h = jax.nn.relu(x @ p["l1"]["w"] + p["l1"]["b"])
        logits = h @ p["l2"]["w"] + p["l2"]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, grads, loss


with tap.track(params, opt_state, alerts=True, to="runs") as tracker:
    for step in range(50):
        i = (jnp.arange(32) + 32 * step) % 320
        params, opt_state, grads, loss = tracker.intercept(update, params, opt_state, x[i], y[i])
        tracker.step(params, opt_state, grads, loss=loss)
print(f"loss {float(loss):.4f}")
