"""Inputs of torch modules that differ in their last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tensortap.rooms.align.perturb import Perturbation


@contextlib.contextmanager
def perturb_inputs(model: Any, found: Perturbation) -> Iterator[bool]:
    """Perturb the inputs of a module meanwhile; yield False for anything else."""
    if not isinstance(model, torch.nn.Module):
        yield False
        return
    generators: dict[torch.device, torch.Generator] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.device not in generators:  # not the global ones: dropout stays the same
            generators[value.device] = torch.Generator(value.device).manual_seed(found.seed)
        found.tensors += 1
        device = value.device.type
        is_autocast = torch.is_autocast_enabled(device)
        coarse = torch.get_autocast_dtype(device) if is_autocast else value.dtype
        return neighbors(value, coarse, generators[value.device])

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return _mapped(moved, args), _mapped(moved, kwargs)

    def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return _mapped(moved, output)

    # first of all hooks, so that others see what the model computes with
    handles = [model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)]
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = [each for each in model.modules() if isinstance(each, embeddings)]
    handles += [each.register_forward_hook(after, prepend=True) for each in tables]
    try:
        yield True
    finally:
        for handle in handles:
            handle.remove()


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with the tensors in its tuples, lists and dicts replaced."""
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(function, item) for item in value)
    return function(value)


def neighbors(
    x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Move each number up or down by a unit in its last place in a dtype; zeros stay."""
    with torch.no_grad():
        plain = x.detach().to(dtype).contiguous()
        bits = plain.view(_INTEGERS[plain.element_size()])
        step = torch.randint(0, 2, x.shape, generator=generator, device=x.device, dtype=bits.dtype)
        found = (bits + 2 * step - 1).view(dtype)
        stays = (plain == 0) | ~torch.isfinite(plain) | ~torch.isfinite(found)
        difference = torch.where(stays, torch.zeros_like(plain), found - plain).to(x.dtype)
    return x + difference  # so that gradients pass


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
