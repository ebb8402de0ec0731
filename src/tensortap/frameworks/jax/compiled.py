"""A jitted JAX function, compiled anew with the statistics of its modules as further outputs.

Its own compiled code is not touched. What was compiled anew is compared with it at its first
call, and where XLA made something else of it, the function itself gives the results from then on.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tensortap.frameworks.jax.harvest import Entry, Harvest, evaluate

numbers = itertools.count()


class Owner(Protocol):
    """Who a function is compiled for."""

    def tracing(self) -> Any:
        """A context in which what is traced is marked."""
        ...

    def say(self, reason: str) -> None:
        """Note what could not be done."""
        ...


class About(NamedTuple):
    """What is known of a program once it is traced."""

    entries: tuple[Entry, ...]
    unseen: tuple[str, ...]
    calls_back: bool
    effects: bool
    number: int


@jax.tree_util.register_pytree_node_class
class Extra:
    """What a compiled function gives beside its results; JAX keeps `about` with the program."""

    def __init__(self, vector: Any, about: About) -> None:
        self.vector = vector
        self.about = about

    def tree_flatten(self) -> tuple[tuple[Any], About]:
        return (self.vector,), self.about

    @classmethod
    def tree_unflatten(cls, about: About, children: tuple[Any]) -> Extra:
        return cls(children[0], about)


class Compiled:
    """A jitted function, compiled anew with statistics as outputs; JAX caches it as its own."""

    def __init__(self, fn: Any, owner: Owner) -> None:
        self.fn = fn
        self.owner = owner
        self._fresh = False
        self._known: set[Any] = set()
        self._differs: set[Any] = set()  # programs that XLA made something else of
        info = fn._jit_info
        options: dict[str, Any] = {
            "static_argnums": info.static_argnums,
            "static_argnames": info.static_argnames,
            "donate_argnums": info.donate_argnums,
            "keep_unused": info.keep_unused,
        }
        if getattr(info, "user_specified_in_shardings", False):
            options["in_shardings"] = _tree(info.in_shardings_treedef, info.in_shardings_leaves)
        out = [s for s in info.out_shardings_leaves if type(s).__name__ != "UnspecifiedValue"]
        if out:
            chosen = _tree(info.out_shardings_treedef, info.out_shardings_leaves)
            options["out_shardings"] = (chosen, None)
        if info.compiler_options_kvs:
            options["compiler_options"] = dict(info.compiler_options_kvs)
        self._static = set(info.static_argnums or ()), set(info.static_argnames or ())
        self._donates = bool(info.donate_argnums)

        @functools.wraps(fn.__wrapped__)  # its signature tells what static arguments are called
        def traced(*args: Any, **kwargs: Any) -> Any:
            return self._trace(args, kwargs)

        self._jitted = jax.jit(traced, **options)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs when JAX meets new shapes."""
        self._fresh = True
        places, names = self._static
        dynamic = [None if i in places or i - len(args) in places else a
                   for i, a in enumerate(args)]  # fmt: skip
        named = {k: v for k, v in kwargs.items() if k not in names}
        leaves, tree = jax.tree_util.tree_flatten((dynamic, named))

        def plain(*leaves: Any) -> Any:
            dynamic, named = jax.tree_util.tree_unflatten(tree, leaves)
            given = [a if i in places or i - len(args) in places else d
                     for i, (a, d) in enumerate(zip(args, dynamic, strict=True))]  # fmt: skip
            return self.fn.__wrapped__(*given, **{**kwargs, **named})

        with self.owner.tracing():
            program, shape = jax.make_jaxpr(plain, return_shape=True)(*leaves)
        found = Harvest()
        outputs = evaluate(program.jaxpr, program.consts, leaves, found)
        results = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), outputs)
        words = [jnp.ravel(v) for v in found.vectors] or [jnp.zeros(0, jnp.uint32)]
        about = About(
            tuple(found.entries),
            tuple(found.unseen),
            found.calls_back,
            bool(program.effects),
            next(numbers),
        )
        return results, Extra(jnp.concatenate(words), about)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Extra]:
        """The results of the plain function, and what was seen."""
        self._fresh = False
        given = args, kwargs
        program: Any = None
        if self._donates:
            # while it is compared, the plain function takes the user's arrays, as it would
            program = _signature(given)
            if program not in self._known or program in self._differs:
                self._known.add(program)
                args, kwargs = jax.tree_util.tree_map(_copy, given)
        results, extra = self._jitted(*args, **kwargs)
        if program is None:
            program = extra.about.number
        differs = program in self._differs
        if not (differs or self._fresh) or extra.about.effects:  # effects must not happen twice
            return results, extra
        plain = self.fn(*given[0], **given[1])
        if not differs and not identical(plain, results):
            self._differs.add(program)
            self.owner.say(DIFFERS.format(getattr(self.fn, "__name__", "the function")))
        return plain, extra


DIFFERS = (
    "{}: with statistics in it, XLA compiles it to code that rounds differently; it runs twice, "
    "so that training stays what it is without"
)


def _tree(structure: Any, leaves: Any) -> Any:
    return jax.tree_util.tree_unflatten(structure, leaves)


def _signature(given: Any) -> Any:
    leaves, structure = jax.tree_util.tree_flatten(given)
    shapes = [(getattr(x, "shape", None), getattr(x, "dtype", type(x))) for x in leaves]
    return structure, tuple(shapes)


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def identical(plain: Any, ours: Any) -> bool:
    """Whether all arrays are the same to the last bit."""
    return all(
        _bytes(a) == _bytes(b)
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(ours), strict=True)
        if isinstance(a, jax.Array) and a.is_fully_addressable
    )


def _bytes(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    with jax.transfer_guard("allow"):
        return np.asarray(array).tobytes()
