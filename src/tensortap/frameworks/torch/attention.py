"""The logits of attention in a torch model, wherever its modules compute them.

`scaled_dot_product_attention` never has them in memory: they are computed again, for some queries.
Where a program computes them itself, the softmax over their last dimension gets them. Both
functions are replaced while a model is tracked, because no hook sees them. The replacements look at
what passes through in observed steps, and do nothing in graphs that are being compiled.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.host import host_view, is_here, is_readable
from tensortap.stats.attention import QuerySample, attention_logits, causal_mask, sample_queries
from tensortap.stats.conversion import as_float64

Reals = NDArray[np.float64]
OnAttention = Callable[[str, Callable[[], Reals | None]], None]
"""Takes the name of a module, and a function that returns logits of its attention, if it has some.

Whatever the function raises must not reach the program.
"""

_compiling: Callable[[], bool] = torch.compiler.is_compiling
_REPLACED = (
    (torch.nn.functional, "scaled_dot_product_attention"),
    (torch, "softmax"), (torch.Tensor, "softmax"),
)  # fmt: skip
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_lock = threading.Lock()
_listeners: list[AttentionCalls] = []
_originals: list[tuple[Any, str, Any]] = []


class UnreadableLogits(Exception):
    """Queries, keys or logits are no floats that the host can read."""


class AttentionCalls:
    """Tells which attention the modules with these `names` (by identity) compute."""

    def __init__(
        self, names: Mapping[int, str], observed: Callable[[], bool], take: OnAttention
    ) -> None:
        self._names = names
        self._observed = observed
        self._take = take

    def attach(self) -> None:
        """Replace the functions, if nobody has done so."""
        with _lock:
            _listeners.append(self)
            if _originals:
                return
            for owner, name in _REPLACED:
                original = getattr(owner, name)
                look = _fused_logits if name.startswith("scaled") else _softmax_logits
                _originals.append((owner, name, owner.__dict__.get(name)))
                setattr(owner, name, _looking(original, look))

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

    def look(self, logits: Callable[..., Reals | None], args: Any, kwargs: Any) -> None:
        """Take logits if a module of this model is computing them."""
        if self._observed() and (module := _calling_module(self._names)) is not None:
            take = functools.partial(logits, module, args, kwargs)
            self._take(self._names[id(module)], take)


@functools.cache
def _looking(original: Any, look: Callable[..., Any]) -> Any:
    """Return the function with a look at its arguments, always the same one."""

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _compiling():
            for listener in tuple(_listeners):
                listener.look(look, args, kwargs)
        return original(*args, **kwargs)

    call.tensortap_original = original  # type: ignore[attr-defined]
    private.script_as(call, original)
    return call


def _calling_module(names: Mapping[int, str]) -> Any:
    """Return the innermost known module whose code is running; None outside of the model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            owner = frame.f_locals.get("self")
            if id(owner) in names and isinstance(owner, torch.nn.Module):
                return owner
        frame = frame.f_back
    return None


def _fused_logits(module: Any, args: Any, kwargs: Any) -> Reals | None:
    """Return logits that `scaled_dot_product_attention` computes, for some queries."""
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
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
            1 / math.sqrt(query.shape[-1]) if scale is None else scale, seen,
        )  # fmt: skip


def _softmax_logits(module: Any, args: Any, kwargs: Any) -> Reals | None:
    """Return logits that a softmax gets, for some queries; None if it is not that of attention."""
    given, *rest = args if args else (kwargs["input"],)
    dim = rest[0] if rest else kwargs.get("dim")
    by_heads = given.ndim == 3 and isinstance(module, torch.nn.MultiheadAttention)
    if dim not in (-1, given.ndim - 1) or not (by_heads or given.ndim == 4):
        return None
    if not _is_plain(given):
        raise UnreadableLogits
    with torch.no_grad(), private.without_overrides():
        if by_heads:
            given = given.detach().unflatten(0, (-1, module.num_heads))
        return _picked(given, sample_queries(given.shape[0], given.shape[2]))


def _is_plain(*tensors: Any) -> bool:
    """Return whether all are floats that the host can read."""
    return all(
        type(each) in (torch.Tensor, torch.nn.Parameter)
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
