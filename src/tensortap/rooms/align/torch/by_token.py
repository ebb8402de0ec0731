"""`track(model, tokens=…)`: one row per token of what each module returns.

A row of a hidden state is its root mean square and 16 random projections, the same in every run:
the distance of two rows is that of their hidden states within about a third, at a fraction of the
bytes. Integers, such as the experts of a router, are recorded as they are.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tensortap.core.record import Kind
from tensortap.rooms.align.contexts import BY_TOKEN, mixed
from tensortap.rooms.align.tokens import record_tokens, record_value
from tensortap.rooms.track.observer import Observer
from tensortap.rooms.track.observing import tensors_in
from tensortap.rooms.track.torch.hooks import ModuleHook, hook_module
from tensortap.rooms.track.torch.names import Names, type_name
from tensortap.rooms.track.torch.track import TrackedModule

PROJECTIONS = 16
_PARTS = ("tokens", "positions", "mask", "cu_seqlens", "sequence")
_INPUTS = {  # names of inputs, as transformers and flash-attention have them
    "positions": ("position_ids", "positions"),
    "mask": ("attention_mask", "mask"),
    "cu_seqlens": ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q"),
}
_CACHES = ("past_key_values", "cache_params", "cache")


class ByToken:
    """The option `tokens` of `track`."""

    def __init__(self, tokens: Any, observer: Observer) -> None:
        if not callable(tokens):
            described = {"tokens": tokens} if isinstance(tokens, str) else tokens
            named = isinstance(described, Mapping) and "tokens" in described
            if not named or not all(
                key in _PARTS and isinstance(name, str) for key, name in described.items()
            ):
                raise TypeError(
                    "tokens must be the name of an input of the model, a dict of names for "
                    f"{', '.join(_PARTS)}, or a function of the inputs, got {tokens!r:.80}"
                )
            tokens = described
        self._tokens, self._observer = tokens, observer

    def hooks(self, tracked: TrackedModule) -> ByTokenHooks:
        return ByTokenHooks(tracked.root, self._tokens, self._observer)


class ByTokenHooks:
    """Hooks on a model, which knows the tokens, and on its modules."""

    def __init__(self, root: torch.nn.Module, tokens: Any, observer: Observer) -> None:
        self._root, self._tokens, self._observer = root, tokens, observer
        self._undo: list[Callable[[], object]] = []
        self._batch: tuple[dict[str, str], tuple[int, int]] | None = None
        self._cache: Callable[[], Any] = type(None)  # a weak reference
        self._generation = 0  # how many caches have begun
        self._calls: dict[str, int] = {}

    def attach(self) -> None:
        for name, module in Names(self._root).modules():
            if self._observer.could_want(Kind.ACTIVATION, name):
                look = functools.partial(self._guarded, self._on_output, name)
                hook = ModuleHook(look)
                self._undo.append(hook_module(module, hook))
        look = functools.partial(self._guarded, self._on_call, "tokens")
        begin = hook_module(self._root, ModuleHook(look), before=True, with_kwargs=True)
        self._undo += [begin, hook_module(self._root, ModuleHook(self._on_end), always_call=True)]

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._batch = None

    def end_step(self, *states: Any, **named: Any) -> None:
        self._calls.clear()

    def _guarded(self, look: Callable[..., None], name: str, *call: Any) -> None:
        observer = self._observer
        is_skipped = observer.only_training and not self._root.training
        if not observer.capturing or is_skipped:
            return
        try:
            look(name, *call)
        except Exception as error:
            observer.fault(name, error)

    # -- the tokens of a call --------------------------------------------------------------

    def _on_call(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._batch = None
        given = self._given(module, args, kwargs)
        if given.get("tokens") is None:
            raise ValueError(f"the model was called without the input {self._tokens!r:.80}")
        tokens = given["tokens"]
        batch, length = (1, *tokens.shape)[-2:]
        mask = given.pop("mask", None)
        if isinstance(mask, torch.Tensor):
            if mask.dim() == 4 and length > 1:  # of pairs of tokens: what the last one sees
                mask = mask[:, 0, -1, :length]
                mask = mask == 0 if mask.is_floating_point() else mask
            elif mask.dim() == 2:
                mask = mask[:, -length:]  # the rest is of cached tokens
            if mask.shape == tokens.shape:
                given["mask"] = mask
        tags = record_tokens(*(given.get(part) for part in _PARTS))
        self._batch = tags, (batch, length)

    def _given(self, module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return what the inputs of a call say about its tokens."""
        if callable(self._tokens):
            found = self._tokens(*args, **kwargs)
            return dict(found) if isinstance(found, Mapping) else {"tokens": found}
        inputs = {**kwargs}
        if args:
            bound = inspect.signature(module.forward).bind_partial(*args)
            inputs |= bound.arguments
        names = {part: (name,) for part, name in self._tokens.items()}
        given = {}
        for part in _PARTS:
            for name in names.get(part, _INPUTS.get(part, ())):
                if inputs.get(name) is not None:
                    given[part] = inputs[name]
        if "sequence" not in names and "cu_seqlens" not in given and "tokens" in given:
            sequence = self._continued(inputs, given["tokens"])
            if sequence is not None:
                given["sequence"] = sequence
        return given

    def _continued(self, inputs: Mapping[str, Any], tokens: torch.Tensor) -> list[str] | None:
        """Return names of the sequences that a cache holds; row by row, they go on with each call.

        A cache that says that it is empty begins new ones. Its length is not asked for where a
        device would have to answer.
        """
        cache = next((inputs[name] for name in _CACHES if inputs.get(name) is not None), None)
        if cache is None:
            return None
        length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else None
        if isinstance(length, torch.Tensor) and length.device.type == "cpu":
            length = int(length)
        is_empty = isinstance(length, int) and length == 0
        if self._cache() is not cache or is_empty:
            self._generation += 1
            self._cache = weakref.ref(cache)
        rows = (1, *tokens.shape)[-2]
        return [f"{id(self)} {self._generation}.{row}" for row in range(rows)]

    def _on_end(self, *call: Any) -> None:
        self._batch = None

    # -- rows ------------------------------------------------------------------------------

    def _on_output(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._batch is None or not self._observer.wants(Kind.ACTIVATION, name):
            return
        tags, (batch, length) = self._batch
        for path, tensor in tensors_in(output, torch.Tensor):
            if _fits(tensor, batch, length):
                own = {**tags, "class": type_name(module), "dtype": str(tensor.dtype)[6:]}
                self._record(name + path + BY_TOKEN, _rows(tensor.detach(), batch * length), own)

    def _record(self, name: str, rows: torch.Tensor, tags: dict[str, str]) -> None:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        step = self._observer.step_number
        record_value(self._observer.prefix + name, rows, "torch.Tensor", step, call, tags)


def _fits(tensor: torch.Tensor, batch: int, length: int) -> bool:
    """Return whether a tensor has a row for each token, and not much more than a hidden state."""
    shape = tuple(tensor.shape)
    rows = 2 if shape[:2] == (batch, length) else 1
    if shape[:rows] not in ((batch, length), (batch * length,)):
        return False
    return len(shape) - rows <= (2 if tensor.is_floating_point() else 1)


def _rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows of a detached tensor."""
    rows = tensor.reshape(count, -1)
    if not rows.is_floating_point():
        return rows
    rows = rows.float()
    signs = _signs(rows.shape[1], rows.device)
    size = rows.square().mean(1, keepdim=True).sqrt()
    return torch.cat([size, rows @ signs], 1)


@functools.lru_cache(64)
def _signs(width: int, device: torch.device) -> torch.Tensor:
    """Return the projections of rows: random signs that are the same in every run."""
    bits = mixed(np.arange(width * PROJECTIONS, dtype=np.uint64)) >> np.uint64(63)
    signs = (bits.astype(np.float32) * 2 - 1) / np.sqrt(np.float32(width * PROJECTIONS))
    return torch.from_numpy(signs.reshape(width, PROJECTIONS)).to(device)
