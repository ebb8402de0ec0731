"""An operator that hands tensors of a compiled graph to this process whenever the graph runs.

A hook that torch.compile traces cannot look at values: there are none yet. It calls `look`, which
becomes part of the graph. When the graph runs, the operator calls the receiver of its probe or its
key, with the tensors where they are. It has side effects, so no compiler removes it; Inductor does
change the order of two that do not depend on each other. An operator that changes a tensor of ours
would need no private interface, but a backward pass saves such a tensor, and raises when another
pass has changed it meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from tensortap.values.torch import private
from tensortap.values.torch.hidden import constant_when_compiled, hide_effects_from_partitioner

log = logging.getLogger("tensortap")

_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)
# CUDA graphs are captured around the operator, because it works on the host
_TAGS = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))

Receiver: TypeAlias = Callable[[list[torch.Tensor], str], None]
"""Takes the tensors of one place in a graph, and the note of that place; must not raise."""

_receivers: dict[str | int, Receiver] = {}
_numbers = itertools.count(1)

library = torch.library.Library("tensortap", "FRAGMENT")
library.define("look(Tensor[] values, Tensor? probe, str key, str note) -> ()", tags=_TAGS)


def _look(values: list[torch.Tensor], probe: torch.Tensor | None, key: str, note: str) -> None:
    receiver = _receivers.get(key if probe is None else probe.item())
    if receiver is not None:
        receiver(values, note)


def _look_at_nothing(*args: Any) -> None:
    """Stand in for the operator while it is compiled, when tensors have no values."""


def _look_at_batch(
    info: Any, dims: Any, values: list[torch.Tensor], probe: Any, key: str, note: str
) -> tuple[None, None]:
    """Look at tensors inside `torch.func.vmap`: at all of the batch, as the first dimension."""
    both = zip(values, dims[0], strict=True)
    whole = [value if dim is None else value.movedim(dim, 0) for value, dim in both]
    torch.ops.tensortap.look(whole, probe, key, note)
    return None, None


library.impl("look", _look, "CompositeExplicitAutograd")
torch.library.register_fake("tensortap::look", _look_at_nothing, lib=library)
if hasattr(torch.library, "register_vmap"):
    torch.library.register_vmap("tensortap::look", _look_at_batch, lib=library)
_kept = private.keep_in_graphs(library, "tensortap::look")


@functools.cache
def _report_once() -> None:
    log.warning(
        "tensortap: nothing is seen inside graphs of torch.compile, because this torch has no "
        "operators with side effects; torch 2.13 has"
    )


def _can_look() -> bool:
    """Return whether the operator stays in graphs; report it if it does not."""
    if _kept:
        hide_effects_from_partitioner()
    else:
        _report_once()
    return _kept


constant_when_compiled(_can_look)


def register(label: str, receiver: Receiver) -> str:
    """Register a receiver; return its key, which is the same for the same model in every run."""
    keys = itertools.chain([label], (f"{label} {n}" for n in itertools.count(2)))
    key = next(key for key in keys if key not in _receivers)
    _receivers[key] = receiver
    return key


def probe(receiver: Receiver) -> torch.Tensor:
    """Register a receiver; return a tensor that tells it apart, until the tensor is dropped.

    A key is part of a graph, but a tensor is an input: modules that share a graph share it still.
    """
    number = next(_numbers)
    _receivers[number] = receiver
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def drop(probe: torch.Tensor) -> None:
    _receivers.pop(int(probe), None)


# -- what torch.compile traces -------------------------------------------------------------


def look(values: list[torch.Tensor], probe: torch.Tensor | None, key: str, note: str) -> None:
    """Make the graph hand these tensors to the receiver of a probe or a key."""
    if not _exporting() and _can_look():
        torch.ops.tensortap.look(values, probe, key, note)


def look_at_gradient(tensor: torch.Tensor, probe: torch.Tensor | None, key: str, note: str) -> None:
    """Make the graph of the backward pass hand the gradient of a tensor to a receiver."""

    def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
        torch.ops.tensortap.look([gradient], probe, key, note)
        return gradient

    if not _exporting() and _can_look():
        tensor.register_hook(on_gradient)


def catch(value: Any, key: str, when: Any) -> None:
    """Make the graph capture a tensor; `when` may be another one, the condition."""
    values = [value.detach(), when.detach()] if isinstance(when, torch.Tensor) else [value.detach()]
    look(values, None, key, "")


def is_tensor(value: Any) -> bool:
    """Return whether a value can be handed to the operator."""
    return isinstance(value, torch.Tensor)
