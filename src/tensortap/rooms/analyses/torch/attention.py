"""The family ``attention``: how large logits get, and how far attention is spread.

`scaled_dot_product_attention` never has the logits in memory: they are computed again, for some
queries of each head. A mode of ``__torch_function__`` sees its arguments. It is active in the
forward passes that are observed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from tensortap.core.record import Kind
from tensortap.rooms.analyses.analysis import Analysis, ModuleOutput
from tensortap.rooms.analyses.numbers import (
    HeadStatistics,
    Reals,
    evenly_spaced,
    head_statistics,
)
from tensortap.rooms.track.torch import internals
from tensortap.rooms.track.torch.hooks import ModuleHook, hook_module
from tensortap.rooms.track.torch.reading import host_view, is_here, is_readable
from tensortap.stats.conversion import as_float64
from tensortap.values.torch import private

COMPILED = "attention in models with compiled parts is not analyzed"
MULTIHEAD = "attention in models with nn.MultiheadAttention is not analyzed"
UNREADABLE = "the queries and keys of attention that the host cannot read are not analyzed"
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class AttentionHeads(Analysis):
    """The largest logit and the mean entropy per head, over all calls of a module in a step."""

    def begin(self, model: Any) -> None:
        self._heads: dict[str, list[HeadStatistics]] = {}
        self._rows: dict[str, str] = {}  # module → its first tensor, which has a row

    def attention(self, name: str, logits: Reals) -> None:
        self._heads.setdefault(name, []).append(head_statistics(logits))

    def output(self, seen: ModuleOutput) -> None:
        if seen.arrays:
            self._rows[seen.name] = seen.arrays[0].name

    def end_step(self) -> None:
        for name, calls in self._heads.items():
            alike = [each for each in calls if len(each.entropy) == len(calls[0].entropy)]
            largest = np.max([each.max_logit for each in alike], axis=0)
            entropy = np.mean([each.entropy for each in alike], axis=0)
            numbers = {"max_logit": float(largest.max()), "entropy": float(entropy.mean())}
            for head in range(len(entropy)):
                numbers[f"max_logit_{head}"] = float(largest[head])
                numbers[f"entropy_{head}"] = float(entropy[head])
            self.give(Kind.ACTIVATION, self._rows.get(name, name), numbers)
        self._heads.clear()


class _AttentionMode(TorchFunctionMode):  # type: ignore[misc]  # no types
    """Shows the arguments of `scaled_dot_product_attention`, in the thread that enters it."""

    def __init__(self, take: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._take = take

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and not torch.compiler.is_compiling():
            self._take({**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs})
        return func(*args, **kwargs)


class AttentionPasses:
    """Enters a mode in the forward passes of a model that are `wanted`.

    A graph depends on the modes around it: torch would compile it once more. So the first training
    pass runs without the mode, and tells whether anything in the model is compiled. If so, no pass
    has the mode.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None], wanted: Callable[[], bool]) -> None:
        self._mode, self._wanted = _AttentionMode(take), wanted
        self._thread = threading.local()  # `depth` of calls, and whether the mode is `entered`
        self._graphs = 0
        self._passes = 0  # training passes that have ended
        self.is_compiled = False

    def attach(self, root: torch.nn.Module) -> list[Callable[[], None]]:
        """Hook into a model; return functions that undo this."""
        begin, end = ModuleHook(self._begin), ModuleHook(self._end)
        return [
            hook_module(root, begin, before=True),
            hook_module(root, end, always_call=True),  # also if the forward raises
        ]

    def _begin(self, root: torch.nn.Module, args: Any) -> None:
        here = self._thread
        here.depth = getattr(here, "depth", 0) + 1
        # after an interrupt, the mode may still be on the stack: it is not entered twice
        if here.depth > 1 or not (root.training and torch.is_grad_enabled()):
            return
        if private.backward_pass() != -1:  # a checkpoint recomputes
            return
        self._graphs = _compiled_graphs()
        if self._passes and not self.is_compiled and self._wanted():
            self._mode.__enter__()
            here.entered = True

    def _end(self, root: torch.nn.Module, args: Any, output: Any) -> None:
        here = self._thread
        if getattr(here, "depth", 0) < 1:
            return  # another hook has raised before `_begin`
        here.depth -= 1
        if here.depth:
            return
        if getattr(here, "entered", False):
            here.entered = False
            self._mode.__exit__(None, None, None)
        if root.training and torch.is_grad_enabled():
            self._passes += 1
            self.is_compiled |= self._graphs != _compiled_graphs()


def _compiled_graphs() -> int:
    loaded = internals.compiler_is_loaded()
    return internals.compiled_graphs() if loaded else 0


class QuerySample(NamedTuple):
    """The indices of sequences and of positions in them whose queries are looked at."""

    sequences: NDArray[np.int64]
    positions: NDArray[np.int64]


def sample_queries(sequences: int, length: int) -> QuerySample:
    """Return which 64 queries of a head are looked at, of up to 4 sequences."""
    picked = evenly_spaced(sequences, 4)
    return QuerySample(picked, evenly_spaced(length, 64 // max(len(picked), 1)))


def attention_logits(
    queries: Reals, keys: Reals, scale: float, mask: NDArray[Any] | None = None
) -> Reals:
    """Return the logits as the softmax gets them: sequence, head, query, key.

    `queries` are (sequence, head, query, width), `keys` (sequence, head, key, width); several heads
    of queries in a row may share a head of keys. A `mask` of booleans says which keys are seen, one
    of numbers is added; -inf stands for a key that is not seen.
    """
    batch, heads, length, width = queries.shape
    shared = keys.shape[1]
    grouped = queries.reshape(batch, shared, heads // shared * length, width)
    products = np.matmul(grouped, keys.transpose(0, 1, 3, 2)) * scale
    logits: Reals = products.reshape(batch, heads, length, keys.shape[2])
    if mask is None:
        return logits
    return np.where(mask, logits, -np.inf) if mask.dtype == np.bool_ else logits + mask


def logits_of(given: dict[str, Any]) -> Reals | None:
    """Return the logits of some queries of a call; None if the host cannot read them."""
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    if not all(map(_is_plain, (query, key))):
        return None
    queries, keys = _four(query), _four(key)
    sample = sample_queries(queries.shape[0], queries.shape[2])
    seen: NDArray[Any] | None = None
    if given.get("is_causal"):
        seen = np.arange(keys.shape[2]) <= sample.positions[:, None]
    elif mask is not None:
        whole = _four(torch.broadcast_to(mask, (*query.shape[:-1], key.shape[-2])))
        seen = _picked(whole, sample)
    scale = given.get("scale")
    return attention_logits(
        _picked(queries, sample), as_float64(_taken(keys, sample.sequences)),
        1 / math.sqrt(query.shape[-1]) if scale is None else float(scale), seen,
    )  # fmt: skip


def _is_plain(tensor: Any) -> bool:
    """Return whether these are floats that the host can read."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_floating_point()
        and not tensor.is_neg()
        and is_readable(tensor)
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
