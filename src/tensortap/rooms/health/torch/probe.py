"""A second forward pass with changed inputs, once, on a deep copy of a module.

It tells whether rows of a batch influence each other, whether outputs depend on later tokens, and
whether batch norm and spectral norm compute the same in evaluation. Random states are restored; a
model that is large, slow, on a device or spread over ranks is not copied.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tensortap.core.ranks import rank_and_world_size
from tensortap.rooms.health.steps import ProbeFacts
from tensortap.rooms.track.observing import inputs_of, tensors_in
from tensortap.rooms.track.torch.reading import is_plain
from tensortap.values.torch.tensors import quiet

_MOST_BYTES = 1 << 30  # of parameters, buffers and inputs
MOST_SECONDS = 0.5  # that a forward pass may take
_NOISE = 1e-3  # of the size of an output; rounding is smaller
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def why_not(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Return why a module is not copied and called; empty if it may be."""
    if rank_and_world_size()[1] > 1:
        return "the model runs on several ranks"
    if isinstance(module, torch.jit.ScriptModule):
        return "the model is a ScriptModule"
    held = [*module.parameters(), *module.buffers()]
    held += [tensor for _, tensor in inputs_of(args, kwargs, torch.Tensor)]
    if not all(is_plain(each) for each in held if each.numel()):
        return "the model is not in plain memory of the CPU"
    size = sum(each.numel() * each.element_size() for each in held)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > min(_MOST_BYTES, free // 8):
        return "a copy of the model takes too much memory"
    return ""


def probe(module: nn.Module, args: Any, kwargs: Any) -> ProbeFacts:
    """Call a copy of a module in `eval()` mode with changed inputs, and say what changes."""
    with _undisturbed():
        twin = _twin(module, {}).eval()
        args, kwargs = copy.deepcopy((_detached(args), _detached(kwargs)))
        given = _changeable(args, kwargs)
        if given is None:
            return ProbeFacts("no input has several rows")
        plain = _outputs(twin(*args, **kwargs))
        if not all(map(torch.equal, plain, _outputs(twin(*args, **kwargs)))):
            with _Dropped() as dropped:
                twin(*args, **kwargs)
            reason = "its output is random in eval() mode, or depends on earlier calls"
            return ProbeFacts(reason, random="dropout" if dropped.found else "sampling")
        rows = [
            row for row in sorted({0, len(given) // 2, len(given) - 1})
            if _row_changes(twin, args, kwargs, given, plain, row)
        ]  # fmt: skip
        later = _depends_on_later(twin, args, kwargs, given, plain)
        return ProbeFacts("", tuple(rows), later, _batch_is_first(given, plain))


def _twin(module: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a module, without running code of it."""
    if id(module) in memo or module is None:
        return memo.get(id(module))
    twin = memo[id(module)] = object.__new__(type(module))
    own = vars(module)
    parts = {name: _twin(part, memo) for name, part in own["_modules"].items()}
    other = "_modules", "_compiled_call_impl"  # which would run the module itself
    state = {name: each for name, each in own.items() if name not in other}
    vars(twin).update(copy.deepcopy(state, memo), _modules=parts)
    return twin


class _Dropped(TorchDispatchMode):  # type: ignore[misc]
    """Notes whether anything is dropped at random; a model may draw other random numbers."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= any(word in str(func) for word in ("dropout", "bernoulli"))
        return func(*args, **(kwargs or {}))


def _batch_is_first(given: torch.Tensor, outputs: list[torch.Tensor]) -> bool:
    """Return whether an output has rows as the input, and no second dimension of it.

    Otherwise nobody knows which of the two dimensions is that of the batch.
    """
    own = [each for each in outputs if each.ndim and len(each) == len(given)]
    return bool(own) and not any(
        given.ndim > 1 and each.shape[1:2] == given.shape[1:2] for each in own
    )


def compare_modes(module: nn.Module, args: Any, kwargs: Any) -> float | None:
    """Return how far outputs are with norms in `train()` and in `eval()` mode; 1 is their size."""
    with _undisturbed():
        twin = _twin(module, {}).eval()
        args, kwargs = copy.deepcopy((_detached(args), _detached(kwargs)))
        evaluated = _outputs(twin(*args, **kwargs))
        for each in twin.modules():
            if is_norm_with_modes(each):
                each.train()
        trained = _outputs(twin(*args, **kwargs))
    if not evaluated or evaluated[0].shape != trained[0].shape:
        return None
    distance = (evaluated[0].double() - trained[0].double()).square().mean().sqrt()
    size = max(_size(evaluated[0]), _size(trained[0]))
    return float(distance) / size if size else None


def is_norm_with_modes(module: nn.Module) -> bool:
    """Return whether a module is batch norm with running statistics, or spectral norm."""
    if isinstance(module, _BATCH_NORMS):
        return bool(vars(module).get("track_running_stats"))
    return "n_power_iterations" in vars(module)


def has_norm_with_modes(module: nn.Module) -> bool:
    return any(map(is_norm_with_modes, module.modules()))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore random states, and keep what the model prints from being printed twice."""
    state, drawn = torch.get_rng_state(), random.getstate()
    numbers = np.random.get_state()  # noqa: NPY002 - the generator that programs share
    try:
        with quiet(), torch.no_grad(), contextlib.redirect_stdout(_OtherThreads(sys.stdout)):
            yield
    finally:
        torch.set_rng_state(state)
        random.setstate(drawn)
        np.random.set_state(numbers)  # noqa: NPY002 - the same


class _OtherThreads(io.TextIOBase):
    """A stream that drops what this thread writes, and passes on what other threads write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(map(_detached, value))
    return {key: _detached(each) for key, each in value.items()} if type(value) is dict else value


def _changeable(args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the first input with several rows that are not all the same."""
    for _, tensor in inputs_of(args, kwargs, torch.Tensor):
        if tensor.ndim and len(tensor) > 1 and tensor.dtype is not torch.bool:
            if (tensor[1:] != tensor[:1]).any():
                return tensor
    return None


def _outputs(output: Any) -> list[torch.Tensor]:
    found = (tensor for _, tensor in tensors_in(output, torch.Tensor))
    return [each.detach().clone() for each in found if each.is_floating_point()]


def _row_changes(
    twin: nn.Module,
    args: Any,
    kwargs: Any,
    given: torch.Tensor,
    plain: list[torch.Tensor],
    row: int,
) -> bool:
    """Return whether another row of the input changes outputs of the other rows."""
    other = next((n for n in range(len(given)) if (given[n] != given[row]).any()), None)
    if other is None:
        return False
    before = given[row].clone()
    given[row] = given[other].clone()
    changed = _outputs(twin(*args, **kwargs))
    given[row] = before
    others = torch.arange(len(given)) != row
    return any(
        _differs(one[others], two[others])
        for one, two in zip(plain, changed, strict=True)
        if one.ndim and len(one) == len(given) and one.shape == two.shape
    )


def _depends_on_later(
    twin: nn.Module, args: Any, kwargs: Any, given: torch.Tensor, plain: list[torch.Tensor]
) -> bool | None:
    """Return whether outputs depend on later places of the second dimension; None if unknown."""
    if given.ndim < 2 or given.shape[1] < 3:
        return None
    length = given.shape[1]
    known = [n for n, each in enumerate(plain) if each.shape[:2] == given.shape[:2]]
    if not known:
        return None
    before = given.clone()
    for place in (length - 1, length // 2):
        given[:, place:] = before.roll(1, 0)[:, place:]
        changed = _outputs(twin(*args, **kwargs))
        given.copy_(before)
        if any(_differs(plain[n][:, :place], changed[n][:, :place]) for n in known):
            return True
    return False


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _differs(one: torch.Tensor, two: torch.Tensor) -> bool:
    largest = float((one.double() - two.double()).abs().max()) if one.numel() else 0.0
    return largest > _NOISE * max(_size(one), 1e-12)
