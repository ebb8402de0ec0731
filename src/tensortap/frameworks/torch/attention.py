"""The logits of attention in a torch model, wherever its modules compute them.

`scaled_dot_product_attention` never has them in memory: they are computed again, for some queries.
Where a program computes them itself, the softmax over their last dimension gets them. Both
functions are replaced while a model is tracked, because no hook sees them. The replacements look at
what passes through in observed steps. A compiled graph hands queries and keys over whenever it
runs; the logits of a softmax, which compilers fuse, it would have to write to memory in every step.

Compilers change the order of operators, and modules share graphs, so a graph tells which module
computes them by numbers: one operator has queries, keys and a number, another one at the end of the
module has its probe and the same number.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.frameworks.torch import graphs, private, private_compiler
from tensortap.frameworks.torch.hidden import constant_when_compiled
from tensortap.frameworks.torch.hooks import ModuleHook
from tensortap.frameworks.torch.host import host_view, is_here, is_readable
from tensortap.stats.attention import QuerySample, attention_logits, causal_mask, sample_queries
from tensortap.stats.conversion import as_float64

Reals = NDArray[np.float64]
OnAttention = Callable[[Callable[[Any], Reals | None], str], None]
"""Takes a function that returns logits of a module, if it has some, and a number in graphs.

Without a number it is the module that is running. What the function raises must not reach the
program.
"""

_UNREADABLE = "the logits of attention that the host cannot read are not analyzed"
_COMPILED = (
    "attention inside compiled graphs is analyzed where modules call scaled_dot_product_attention: "
    "not that of a softmax, of nn.MultiheadAttention or of distributed tensors"
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_REPLACED = (
    (torch.nn.functional, "scaled_dot_product_attention"),
    (torch, "softmax"), (torch.Tensor, "softmax"),
)  # fmt: skip
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_lock = threading.Lock()
_listeners: list[AttentionCalls] = []
_originals: list[tuple[Any, str, Any]] = []


class UnreadableLogits(Exception):
    """Logits cannot be read, or are not floats; the message is for `tracker.unseen`."""

    def __init__(self, reason: str = _UNREADABLE) -> None:
        super().__init__(reason)


class AttentionCalls:
    """Tells which attention the modules of a model compute."""

    def __init__(self, take: OnAttention) -> None:
        self.take = take

    def attach(self) -> None:
        """Replace the functions, if nobody has done so."""
        with _lock:
            _listeners.append(self)
            if _originals:
                return
            for owner, name in _REPLACED:
                original = getattr(owner, name)
                fused = name.startswith("scaled")
                _originals.append((owner, name, owner.__dict__.get(name)))
                setattr(owner, name, _looking(original, fused))

    def detach(self) -> None:
        """Put the functions back after the last model."""
        with _lock:
            _listeners.remove(self)
            while _originals and not _listeners:
                owner, name, original = _originals.pop()
                if not hasattr(owner.__dict__.get(name), "tensortap_original"):
                    continue  # somebody else has replaced it since
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


@functools.cache
def _looking(original: Any, fused: bool) -> Any:
    """Return the function with a look at its arguments, always the same one."""
    look = functools.partial(_on_call, _fused_logits if fused else _softmax_logits)
    hook = ModuleHook(look, _insert_fused if fused else _insert_softmax)

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        hook(args, kwargs)
        return original(*args, **kwargs)

    call.tensortap_original = original  # type: ignore[attr-defined]
    private.script_as(call, original)
    return call


def _on_call(logits: Callable[..., Reals | None], args: Any, kwargs: Any, number: str = "") -> None:
    for listener in tuple(_listeners):
        listener.take(functools.partial(logits, args, kwargs), number)


# -- called while a graph is compiled ------------------------------------------------------


class TracedModules:
    """Modules that have begun in a graph: of each, numbers of its attention; the innermost last."""

    def __init__(self) -> None:
        self.running: list[list[str]] = []
        self.numbers = itertools.count(1)  # within a graph, so that caches recognize it


def _modules() -> TracedModules:
    """Return the modules of the graph that is being compiled."""
    graph, found = private_compiler.traced_graph(), TracedModules()
    return found if graph is None else vars(graph).setdefault("_tensortap_modules", found)


def begin_module() -> int:
    """Note that the graph begins with a module."""
    running = _modules().running
    running.append([])
    return len(running)


def end_module() -> str:
    """Note that a module ends; return the numbers of the attention in it."""
    running = _modules().running
    return " ".join(running.pop()) if running else ""


def _number() -> str:
    """Return a number for attention; an empty one if no module has begun in the graph."""
    modules = _modules()
    if not modules.running:
        return ""
    number = str(next(modules.numbers))
    modules.running[-1].append(number)
    return number


for _function in (begin_module, end_module, _number):
    constant_when_compiled(_function)


# -- in compiled graphs --------------------------------------------------------------------


def _insert_fused(hook: ModuleHook, args: Any, kwargs: Any) -> None:
    """Make the graph that is being traced hand over what `_fused_logits` needs."""
    given = _by_name(args, kwargs)
    values = [given["query"], given["key"]]
    names = ["query", "key"]
    if given.get("attn_mask") is not None:
        values.append(given["attn_mask"])
        names.append("attn_mask")
    # functions of torch that the compiler does not look into run with tensors of its own
    if not all(type(value) in _PLAIN for value in values):
        _look([], "")
        return
    if given.get("scale") is not None:  # which may be a symbol; CUDA graphs have no CPU tensors
        device = given["query"].device if given["query"].is_cuda else "cpu"
        values.append(torch.full((), given["scale"], dtype=torch.float64, device=device))
        names.append("scale")
    if given.get("is_causal"):
        names.append("is_causal")
    _look([value.detach() for value in values], f"{_number()}\n{' '.join(names)}")


def _insert_softmax(hook: ModuleHook, args: Any, kwargs: Any) -> None:
    """Make the graph that is being traced tell that it computes a softmax, as of attention."""
    given, dim = _softmax_arguments(args, kwargs)
    attention = given.ndim == 4 or (given.ndim == 3 and type(given) not in _PLAIN)
    if attention and dim in (-1, given.ndim - 1):
        _look([], "")


def _look(values: list[torch.Tensor], note: str) -> None:
    grad = "1" if torch.is_grad_enabled() else ""
    graphs.look(values, None, _KEY, f"{grad}\n{note}")


def _from_graph(values: list[torch.Tensor], note: str) -> None:
    """Take what a graph hands over."""
    grad, number, *names = note.split("\n")
    with torch.set_grad_enabled(bool(grad)):  # graphs run without it, whatever the program said
        if not names:
            _on_call(_unseen_logits, (), {}, "0")
            return
        given: dict[str, Any] = {"is_causal": "is_causal" in names[0]}
        given.update(zip(names[0].split(), values, strict=False))
        _on_call(_fused_logits, (), given, number)


_KEY = graphs.register("tensortap.attention", _from_graph)


# -- logits --------------------------------------------------------------------------------


def _by_name(args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}


def _fused_logits(args: Any, kwargs: Any, module: Any) -> Reals | None:
    """Return logits that `scaled_dot_product_attention` computes, for some queries."""
    given = _by_name(args, kwargs)
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    if not _is_plain(query, key):
        raise UnreadableLogits
    with torch.no_grad(), private.without_overrides():
        queries, keys = _four(query), _four(key)
        sample = sample_queries(queries.shape[0], queries.shape[2])
        seen: NDArray[Any] | None = None
        if given.get("is_causal"):
            seen = causal_mask(sample.positions, keys.shape[2])
        elif mask is not None:
            whole = _four(torch.broadcast_to(mask, (*query.shape[:-1], key.shape[-2])))
            seen = _picked(whole, sample)
        scale = given.get("scale")
        return attention_logits(
            _picked(queries, sample), as_float64(_taken(keys, sample.sequences)),
            1 / math.sqrt(query.shape[-1]) if scale is None else float(scale), seen,
        )  # fmt: skip


def _softmax_logits(args: Any, kwargs: Any, module: Any) -> Reals | None:
    """Return logits that a softmax gets, for some queries; None if it is not that of attention."""
    given, dim = _softmax_arguments(args, kwargs)
    by_heads = given.ndim == 3 and isinstance(module, torch.nn.MultiheadAttention)
    if dim not in (-1, given.ndim - 1) or not (by_heads or given.ndim == 4):
        return None
    if not _is_plain(given):
        raise UnreadableLogits
    with torch.no_grad(), private.without_overrides():
        if by_heads:
            given = given.detach().unflatten(0, (-1, module.num_heads))
        return _picked(given, sample_queries(given.shape[0], given.shape[2]))


def _unseen_logits(args: Any, kwargs: Any, module: Any) -> None:
    """Raise an error for attention of which a graph hands nothing over."""
    raise UnreadableLogits(_COMPILED)


def _softmax_arguments(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the tensor that a softmax gets, and its dimension."""
    given, *rest = args if args else (kwargs["input"],)
    return given, rest[0] if rest else kwargs.get("dim")


def _is_plain(*tensors: Any) -> bool:
    """Return whether all are floats that the host can read."""
    return all(
        type(each) in _PLAIN
        and each.is_floating_point()
        and not each.is_neg()
        and is_readable(each)
        for each in tensors
    )


def _four(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with four dimensions: sequence, head, position, width."""
    while tensor.ndim < 4:
        tensor = tensor.unsqueeze(0)
    return tensor.detach().flatten(0, tensor.ndim - 4)


def _picked(tensor: torch.Tensor, sample: QuerySample) -> NDArray[Any]:
    """Return the rows of a sample of queries: sequence, head, query, and the rest."""
    index = (sample.sequences[:, None], slice(None), sample.positions)
    rows = _taken(tensor, index).swapaxes(1, 2)
    return rows if rows.dtype == np.bool_ else as_float64(rows)


def _taken(tensor: torch.Tensor, index: Any) -> NDArray[Any]:
    """Return some elements; of a tensor on a device, only these are copied."""
    found = host_view(tensor)[index] if is_here(tensor) else host_view(tensor[index])
    return np.asarray(found)
