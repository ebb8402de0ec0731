"""Jitted JAX functions, compiled a second time with statistics as additional outputs.

The user's own compiled code stays as it is. At its first call the instrumented version is compared
with it bit for bit. If XLA has compiled it differently, the results come from the user's own
version from then on, and only the statistics from a third one. That one returns nothing else, so it
computes no more than they need, and takes no arrays away that the user's function gets donated.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tensortap.rooms.track.jax.harvest import Harvest, evaluate
from tensortap.rooms.track.jax.marks import MarkedValue

ROUNDS_DIFFERENTLY = (
    "everything in it is observed, but it takes about twice the time: its results come from your "
    "own function and stay bit-identical, its statistics from a second version, because XLA "
    "compiles one version with both to code that rounds differently"
)
_JITTED = type(jax.jit(lambda: None))
_OPTIONS = "_jit_info"  # the attribute of a jitted function with its options
_program_ids = itertools.count()


def is_jitted(fn: Any) -> bool:
    """Return whether `fn` is what `jax.jit` returns."""
    return type(fn) is _JITTED


def jit_options(fn: Any) -> dict[str, Any] | None:
    """Return the options that `fn` was jitted with, or None if this JAX does not provide them.

    There is no public interface for this.
    """
    info: Any = getattr(fn, _OPTIONS, None)
    try:
        return {
            "static_argnums": info.static_argnums,
            "static_argnames": info.static_argnames,
            "donate_argnums": info.donate_argnums,
            "keep_unused": info.keep_unused,
            "compiler_options": dict(info.compiler_options_kvs) or None,
        }
    except AttributeError:
        return None


class ProgramInfo(NamedTuple):
    """Facts about a program, found by tracing it."""

    values: tuple[MarkedValue, ...]
    has_effects: bool
    id: int


class _Effects(Exception):
    """A program with effects, such as printing."""


@jax.tree_util.register_pytree_node_class
class PackedOutputs:
    """The packed statistics of one call; JAX keeps `info` with the compiled program."""

    def __init__(self, vector: Any, info: ProgramInfo) -> None:
        self.vector = vector
        self.info = info

    def tree_flatten(self) -> tuple[tuple[Any], ProgramInfo]:
        return (self.vector,), self.info

    @classmethod
    def tree_unflatten(cls, info: ProgramInfo, children: tuple[Any]) -> PackedOutputs:
        return cls(children[0], info)


class InstrumentedJit:
    """A jitted function with statistics as additional outputs.

    `marking` makes a context in which modules mark their outputs; `remark` takes a name and what
    the user should know about it.
    """

    def __init__(
        self,
        fn: Any,
        options: dict[str, Any],
        marking: Callable[[], AbstractContextManager[None]],
        remark: Callable[[str, str], object],
    ) -> None:
        self.fn = fn
        self.name = getattr(fn, "__name__", "function")
        self._marking = marking
        self._remark = remark
        self._options = options
        # ids of programs, and signatures of arguments that lead to a verified program
        self._verified: set[int] = set()
        self._runs_twice = False
        self._verified_signatures: set[Any] = set()

        @functools.wraps(fn.__wrapped__)  # its signature has the names of static arguments
        def traced(*args: Any, **kwargs: Any) -> Any:
            return self._trace(args, kwargs)

        @functools.wraps(fn.__wrapped__)
        def statistics(*args: Any, **kwargs: Any) -> Any:
            packed = self._trace(args, kwargs)[1]
            if packed.info.has_effects:  # they must not happen twice
                raise _Effects
            return packed

        self._jitted = jax.jit(traced, **options)
        self._statistics = jax.jit(statistics, **{**options, "donate_argnums": None})

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace the marked function; JAX calls this for new shapes and static arguments."""
        count = len(args)
        static = {i % count for i in self._options["static_argnums"] or () if -count <= i < count}
        static_names = self._options["static_argnames"] or ()
        dynamic = [None if i in static else arg for i, arg in enumerate(args)]
        named = {k: v for k, v in kwargs.items() if k not in static_names}
        leaves, tree = jax.tree_util.tree_flatten((dynamic, named))

        def plain(*leaves: Any) -> Any:
            dynamic, named = jax.tree_util.tree_unflatten(tree, leaves)
            given = [args[i] if i in static else arg for i, arg in enumerate(dynamic)]
            return self.fn(*given, **{**kwargs, **named})

        with self._marking():
            program, shape = jax.make_jaxpr(plain, return_shape=True)(*leaves)
        harvest = Harvest()
        outputs = evaluate(program.jaxpr, program.consts, leaves, harvest)
        results = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), outputs)
        vectors = [jnp.ravel(v) for v in harvest.vectors] or [jnp.zeros(0, jnp.uint32)]
        info = ProgramInfo(tuple(harvest.values), bool(program.effects), next(_program_ids))
        return results, PackedOutputs(jnp.concatenate(vectors), info)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, PackedOutputs]:
        """Return the results of the plain function, and the statistics."""
        if self._runs_twice:
            with contextlib.suppress(_Effects):
                packed = self._statistics(*args, **kwargs)  # first: the function may take arrays
                return self.fn(*args, **kwargs), packed
        ours = args, kwargs
        donates = bool(self._options["donate_argnums"])
        signature = _signature(ours) if donates else None
        copied = donates and signature not in self._verified_signatures
        if copied:
            # both versions run: the plain function gets the user's arrays and donates them
            ours = jax.tree_util.tree_map(_copy, ours)
        results, packed = self._jitted(*ours[0], **ours[1])
        program = packed.info.id
        if program in self._verified or packed.info.has_effects:  # effects must not happen twice
            self._verified_signatures.add(signature)
            return results, packed
        if donates and not copied:  # a new program, but the arrays are gone: verify it next time
            self._verified_signatures.discard(signature)
            return results, packed
        plain = self.fn(*args, **kwargs)
        if identical(plain, results):
            self._verified.add(program)
            self._verified_signatures.add(signature)
        else:
            self._runs_twice = True
            self._remark(self.name, ROUNDS_DIFFERENTLY)
        return plain, packed


def _signature(arguments: Any) -> Any:
    leaves, structure = jax.tree_util.tree_flatten(arguments)
    attributes = ("shape", "dtype", "weak_type", "sharding")
    return structure, tuple((type(x), *(getattr(x, a, None) for a in attributes)) for x in leaves)


def _copy(leaf: Any) -> Any:
    # without a device, an array that is not committed to one stays so
    return jax.device_put(leaf, may_alias=False) if isinstance(leaf, jax.Array) else leaf


def identical(a: Any, b: Any) -> bool:
    """Return whether all arrays in two trees are bit-identical."""
    return all(
        _bytes(x) == _bytes(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        if isinstance(x, jax.Array) and x.is_fully_addressable
    )


def _bytes(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    with jax.transfer_guard("allow"):
        return np.asarray(array).tobytes()
