"""The contract of JAX on one of its devices: see `tensortap.rooms.doctor.contract`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from tensortap import catch
from tensortap.core.dtypes import DTYPES
from tensortap.rooms.doctor.contract import Contract

# JAX computes 64-bit dtypes in 32 bits unless x64 is on, and has no arrays of 6-bit floats
_MISSING = {"int64", "uint64", "float64", "complex128", "float6_e2m3fn", "float6_e3m2fn"}


class JaxContract(Contract):
    """Arrays of JAX."""

    framework = "jax"
    dtypes = tuple(row.name for row in DTYPES.values() if row.jax and row.name not in _MISSING)

    def tensor(self, array: NDArray[Any], dtype: str) -> Any:
        return jax.device_put(array, self.device)

    def contents(self, tensor: Any) -> bytes:
        return np.asarray(tensor).tobytes()

    def overwrite(self, tensor: Any) -> None:
        tensor.delete()

    def work(self, times: int) -> Any:
        start = jax.device_put(np.full((512, 512), 1 / 512, np.float32), self.device)
        return _multiply(start, times)

    @contextlib.contextmanager
    def observer(self, track: Callable[..., Any]) -> Iterator[Callable[[Any], object]]:
        with track({"w": self.work(1)}) as tracker:
            yield lambda value: tracker.step({"w": value})

    def train(self, track: Callable[..., Any] | None) -> Iterator[bytes]:
        random = np.random.default_rng(0)
        shapes = {"first": (64, 64), "second": (64, 8)}
        made = {n: random.normal(0, 0.1, s).astype(np.float32) for n, s in shapes.items()}
        params = jax.device_put(made, self.device)
        with track(params) if track else contextlib.nullcontext() as tracker:
            for _ in range(10):
                x = jax.device_put(random.normal(size=(16, 64)).astype(np.float32), self.device)
                params, grads = _update(params, x, caught=tracker is not None)
                if tracker is not None:
                    tracker.step(params, grads=grads)
                yield b"".join(map(self.contents, params.values()))


@functools.partial(jax.jit)
def _multiply(matrix: Any, times: int) -> Any:
    return jax.lax.fori_loop(0, times, lambda _, x: x @ x, matrix)


@functools.partial(jax.jit, static_argnames="caught")
def _update(params: dict[str, Any], x: Any, *, caught: bool) -> tuple[dict[str, Any], Any]:
    def loss(params: dict[str, Any]) -> Any:
        hidden = jax.nn.gelu(x @ params["first"])
        if caught:
            catch(hidden, "hidden")
        return jnp.mean((hidden @ params["second"]) ** 2)

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda value, grad: value - 0.01 * grad, params, grads), grads
