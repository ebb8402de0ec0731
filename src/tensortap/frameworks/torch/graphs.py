"""An operator that hands tensors of a compiled graph to this process whenever the graph runs.

A hook that torch.compile traces cannot look at values: there are none yet. It calls `look`, which
becomes part of the graph. When the graph runs, the operator calls the receiver of its probe or its
key, with the tensors where they are. The operator claims to change a tensor of ours, so
that no compiler removes it or changes the order of two of them. A backward pass cannot do that:
its graph would save the tensor for each forward pass, and complain that it has been changed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from tensortap.frameworks.torch import private

log = logging.getLogger("tensortap")

Receiver: TypeAlias = Callable[[list[torch.Tensor], str], None]
"""Takes the tensors of one place in a graph, and the note of that place; must not raise."""

_receivers: dict[str | int, Receiver] = {}
_numbers = itertools.count(1)
with torch.inference_mode(False):
    _ORDER = torch.zeros(1, dtype=torch.uint8, device="cpu")

_library = torch.library.Library("tensortap", "FRAGMENT")
_library.define("look(Tensor[] values, Tensor? probe, Tensor(a!) order, str key, str note) -> ()")
_library.define("look_back(Tensor gradient, Tensor? probe, str key, str note) -> ()")


def _look(
    values: list[torch.Tensor], probe: torch.Tensor | None, order: Any, key: str, note: str
) -> None:
    receiver = _receivers.get(key if probe is None else probe.item())
    if receiver is not None:
        receiver(values, note)


def _look_back(gradient: torch.Tensor, probe: torch.Tensor | None, key: str, note: str) -> None:
    _look([gradient], probe, None, key, note)


def _nothing(*args: Any) -> None:
    """Stand in for an operator while it is compiled, when tensors have no values."""


for _name, _run in (("look", _look), ("look_back", _look_back)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tensortap::{_name}", _nothing, lib=_library)
SEES_GRADIENTS = private.keep_in_graphs(_library, "tensortap::look_back")


def register(label: str, receiver: Receiver) -> str:
    """Register a receiver; return its key, which is the same for the same model in every run."""
    keys = itertools.chain([label], (f"{label} {n}" for n in itertools.count(2)))
    key = next(key for key in keys if key not in _receivers)
    _receivers[key] = receiver
    return key


def unregister(key: str) -> None:
    """Forget a receiver; graphs that still have its key do nothing there."""
    _receivers.pop(key, None)


def probe(receiver: Receiver) -> torch.Tensor:
    """Register a receiver; return a tensor that tells it apart, until the tensor is dropped.

    A key is part of a graph, but a tensor is an input: modules that share a graph share it still.
    """
    number = next(_numbers)
    _receivers[number] = receiver
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def drop(probe: torch.Tensor) -> None:
    """Forget the receiver of a probe."""
    _receivers.pop(int(probe), None)


# -- what torch.compile traces -------------------------------------------------------------


def look(values: list[torch.Tensor], probe: torch.Tensor | None, key: str, note: str) -> None:
    """Make the graph hand these tensors to the receiver of a probe or a key."""
    torch.ops.tensortap.look(values, probe, _ORDER, key, note)


def look_at_gradient(tensor: torch.Tensor, probe: torch.Tensor | None, key: str, note: str) -> None:
    """Make the graph of the backward pass hand the gradient of a tensor to a receiver."""

    def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
        torch.ops.tensortap.look_back(gradient, probe, key, note)
        return gradient

    tensor.register_hook(on_gradient)


def catch(value: Any, key: str, when: Any) -> None:
    """Make the graph capture a tensor; `when` may be another one, the condition."""
    values = [value.detach(), when.detach()] if isinstance(when, torch.Tensor) else [value.detach()]
    torch.ops.tensortap.look(values, None, _ORDER, key, "")


def is_tensor(value: Any) -> bool:
    """Return whether a value can be handed to the operator."""
    return isinstance(value, torch.Tensor)


# -- graphs that exist already -------------------------------------------------------------

_known_graphs = 0


def forget_graphs(what: str, begins: bool) -> None:
    """Make torch compile everything anew: existing graphs know nothing of new or removed hooks."""
    global _known_graphs
    private.guard_hooks(1 if begins else -1)
    if not private.compiler_is_loaded():
        return
    torch.compiler.reset()
    graphs = private.compiled_graphs()
    if graphs > _known_graphs:
        reason = f"{what}, and once more when that ends" if begins else f"{what} no longer"
        level = logging.WARNING if begins else logging.INFO  # of an end, the beginning has told
        log.log(level, "tensortap: torch.compile compiles existing graphs anew: %s", reason)
    _known_graphs = graphs
