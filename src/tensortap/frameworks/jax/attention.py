"""The logits of attention in a JAX program: queries and keys are sampled while it is traced.

`jax.nn.dot_product_attention` and the weights of Flax's attention are replaced while a program is
traced for `intercept`. What they get is sampled inside the program, and one more output of it; the
logits are computed from that on the host, in double precision.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from tensortap.stats.attention import attention_logits, causal_mask, sample_queries

_FUNCTIONS = (
    ("jax.nn", "dot_product_attention"),
    ("flax.linen.attention", "dot_product_attention_weights"),
    ("flax.nnx.nn.attention", "dot_product_attention_weights"),
)
_UNUSUAL = ("query_seq_lengths", "key_value_seq_lengths", "local_window_size")

OnSample = Callable[["AttentionSample", Any], None]
"""Takes what a sample holds, and the sample: a traced vector of float32."""

_lock = threading.Lock()
_users = 0
_originals: list[tuple[Any, str, Any]] = []


class AttentionSample(NamedTuple):
    """The parts of a sample: shapes of queries, keys and mask, and the scale of the logits."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    mask: tuple[int, ...]
    scale: float

    @property
    def size(self) -> int:
        """Return the number of elements of all parts."""
        return math.prod(self.queries) + math.prod(self.keys) + math.prod(self.mask)

    def logits(self, words: NDArray[Any]) -> NDArray[np.float64]:
        """Return the logits: sequence, head, query, key."""
        values = np.ascontiguousarray(words).view(np.float32).astype(np.float64)
        first = math.prod(self.queries)
        ends = [first, first + math.prod(self.keys)]
        queries, keys, mask = np.split(values, ends)
        return attention_logits(
            queries.reshape(self.queries), keys.reshape(self.keys), self.scale,
            mask.reshape(self.mask),
        )  # fmt: skip


@contextlib.contextmanager
def sampled_attention(take: Callable[[], OnSample | None]) -> Iterator[None]:
    """Sample the attention that is traced here; `take` returns who takes it in this thread."""
    global _users
    with _lock:
        _users += 1
        for library, name in _FUNCTIONS if _users == 1 else ():
            module = sys.modules.get(library)
            original = getattr(module, name, None)
            if original is not None:
                _originals.append((module, name, original))
                setattr(module, name, _sampling(original, take))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            while _originals and not _users:
                setattr(*_originals.pop())


def _sampling(original: Any, take: Callable[[], OnSample | None]) -> Any:
    is_flax = original.__name__.endswith("weights")

    @functools.wraps(original)
    def call(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        on_sample = take()
        if on_sample is not None:
            # without the value, the two functions begin with the same arguments
            named = dict(zip(("bias", "mask"), args if is_flax else args[1:], strict=False))
            with contextlib.suppress(Exception):  # the original says what is wrong
                found = _sample(query, key, **{**kwargs, **named})
                if found is not None:
                    on_sample(*found)
        return original(query, key, *args, **kwargs)

    return call


def _sample(
    query: Any,
    key: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    **others: Any,
) -> tuple[AttentionSample, Any] | None:
    """Return a sample of queries and keys: (…, position, head, width) each."""
    if any(others.get(name) is not None for name in _UNUSUAL):
        return None
    query, key = (jax.lax.stop_gradient(jnp.asarray(each)) for each in (query, key))
    queries, keys = (each.reshape(-1, *each.shape[-3:]) for each in (query, key))
    length, heads, width = queries.shape[1:]
    picked = sample_queries(queries.shape[0], length)
    seen = jnp.zeros((1, 1, len(picked.positions), keys.shape[1]), jnp.float32)
    whole = (*query.shape[:-3], heads, length, keys.shape[1])

    def some(each: Any) -> Any:
        each = jnp.broadcast_to(jax.lax.stop_gradient(each), whole)
        return each.reshape(-1, *whole[-3:])[picked.sequences][:, :, picked.positions]

    if bias is not None:
        seen = seen + some(bias).astype(jnp.float32)
    if mask is not None:
        seen = jnp.where(some(mask), seen, -jnp.inf)
    if is_causal:
        seen = jnp.where(causal_mask(picked.positions, keys.shape[1]), seen, -jnp.inf)
    parts = (
        queries[picked.sequences][:, picked.positions].transpose(0, 2, 1, 3),
        keys[picked.sequences].transpose(0, 2, 1, 3),
        seen,
    )
    queries_shape, keys_shape, mask_shape = (tuple(each.shape) for each in parts)
    factor = float(scale or 1 / math.sqrt(width))
    sample = AttentionSample(queries_shape, keys_shape, mask_shape, factor)
    return sample, jnp.concatenate([each.astype(jnp.float32).ravel() for each in parts])
