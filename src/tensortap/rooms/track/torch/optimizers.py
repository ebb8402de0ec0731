"""Optimizers as users pass them: alone, in lists, and inside the wrappers of trainers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class FoundOptimizer(NamedTuple):
    """An optimizer that the user passed, or that is inside one; `number` counts the passed ones."""

    optimizer: Any
    number: int
    wraps: bool  # whether others are inside


def find_optimizers(given: Any) -> list[FoundOptimizer]:
    """Return the optimizers and all that are inside them, wrappers before what they wrap.

    >>> adam = torch.optim.Adam([torch.zeros(1)])
    >>> wrapper = type("Wrapper", (), {"param_groups": [], "step": adam.step})()
    >>> wrapper.inner = adam
    >>> [type(one.optimizer).__name__ for one in find_optimizers([wrapper])]
    ['Wrapper', 'Adam']
    """
    optimizers = given if issubclass(type(given), (list, tuple)) else [given]
    found: dict[int, FoundOptimizer] = {}
    for number, each in enumerate(one for one in optimizers if one is not None):
        if not _is_optimizer(each):
            raise TypeError(
                f"optimizer must be a torch optimizer, or a list of them, got {shown(each)}"
            )
        _find(each, number, found)
    return list(found.values())


def _find(optimizer: Any, number: int, found: dict[int, FoundOptimizer]) -> None:
    if id(optimizer) not in found:
        inside = _inside(optimizer)
        found[id(optimizer)] = FoundOptimizer(optimizer, number, bool(inside))
        for each in inside:
            _find(each, number, found)


def _inside(optimizer: Any) -> list[Any]:
    """Return the optimizers that a wrapper holds, whatever it calls them."""
    try:
        held = list(vars(optimizer).values())
    except Exception:  # it has slots, or raises
        held = []
    with contextlib.suppress(Exception):
        held.append(optimizer.optimizer)
    for each in list(held):
        if type(each) in (list, tuple):
            held.extend(each)
        elif type(each) is dict:
            held.extend(each.values())
    return [each for each in held if each is not optimizer and _is_optimizer(each)]


def _is_optimizer(value: Any) -> bool:
    try:
        if isinstance(value, (torch.nn.Module, torch.Tensor, type)):
            return False
        return hasattr(value, "param_groups") and hasattr(value, "step")
    except Exception:
        return False


def shown(value: Any) -> str:
    """Return the start of the repr of an object, which may not have one."""
    try:
        return repr(value)[:100]
    except Exception:
        return f"a {type(value).__name__}"


def parameters_of(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def zeroes_itself(optimizer: Any) -> bool:
    """Return whether a wrapper zeroes gradients as torch does, not through what it wraps."""
    own = getattr(type(optimizer), "zero_grad", None)
    return own is torch.optim.Optimizer.zero_grad


def before_zero_grad(optimizer: Any, look: Callable[[Any], None]) -> Callable[[], None]:
    """Call `look` before an optimizer zeroes its gradients; return a function that undoes this.

    Optimizers have hooks for their step, but none for `zero_grad`. It is replaced in the instance's
    own dict, because a wrapper may pass on what is assigned to it.
    """
    own = vars(optimizer).get("zero_grad")
    original = optimizer.zero_grad

    @functools.wraps(original)
    def zero_grad(*args: Any, **kwargs: Any) -> Any:
        look(optimizer)
        return original(*args, **kwargs)

    def undo() -> None:
        if vars(optimizer).get("zero_grad") is zero_grad:
            del vars(optimizer)["zero_grad"]
            if own is not None:
                vars(optimizer)["zero_grad"] = own

    vars(optimizer)["zero_grad"] = zero_grad
    return undo
