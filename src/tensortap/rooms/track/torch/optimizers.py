"""Optimizers as users pass them: alone, in lists, and inside the wrappers of trainers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tensortap.rooms.track.torch.hooks import BreakingHook, skip_code


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
            got = type(each).__name__
            raise TypeError(f"optimizer must be a torch optimizer, or a list of them, got {got}")
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
    held = [*getattr(optimizer, "__dict__", {}).values(), getattr(optimizer, "optimizer", None)]
    for each in list(held):
        if type(each) in (list, tuple):
            held.extend(each)
        elif type(each) is dict:
            held.extend(each.values())
    return [each for each in held if each is not optimizer and _is_optimizer(each)]


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, (torch.nn.Module, torch.Tensor, type)):
        return False
    return hasattr(value, "param_groups") and hasattr(value, "step")


def parameters_of(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def zeroes_itself(optimizer: Any) -> bool:
    """Return whether a wrapper zeroes gradients as torch does, not through what it wraps."""
    own = getattr(type(optimizer), "zero_grad", None)
    return own is torch.optim.Optimizer.zero_grad


def hook_step(
    optimizer: Any,
    before: Callable[..., None],
    after: Callable[..., None],
    missed: Callable[[str], object],
) -> list[Callable[[], None]]:
    """Call functions before and after each step; return functions that end this.

    If a compiler hides the steps, `missed` is called with the reason.
    """
    return [
        optimizer.register_step_pre_hook(BreakingHook(before, missed)).remove,
        optimizer.register_step_post_hook(BreakingHook(after, missed)).remove,
    ]


def before_zero_grad(
    optimizer: Any, look: Callable[[Any], None], missed: Callable[[str], object]
) -> Callable[[], None]:
    """Call `look` before an optimizer zeroes its gradients; return a function that undoes this.

    Optimizers have hooks for their step, but none for `zero_grad`. It is replaced in the instance's
    own dict, because a wrapper may pass on what is assigned to it.
    """
    hook = BreakingHook(look, missed)
    own = vars(optimizer).get("zero_grad")
    original = optimizer.zero_grad

    @functools.wraps(original)
    def zero_grad(*args: Any, **kwargs: Any) -> Any:
        hook(optimizer)
        return original(*args, **kwargs)

    skip_code(zero_grad.__code__)  # type: ignore[attr-defined]

    def undo() -> None:
        if vars(optimizer).get("zero_grad") is zero_grad:
            del vars(optimizer)["zero_grad"]
            if own is not None:
                vars(optimizer)["zero_grad"] = own

    vars(optimizer)["zero_grad"] = zero_grad
    return undo
