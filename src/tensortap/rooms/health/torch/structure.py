"""The structure of a torch model: initial weights, and unregistered or repeated layers."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from tensortap.core.record import Summary
from tensortap.rooms.health.steps import InitialWeight
from tensortap.rooms.track.observing import tensors_in
from tensortap.rooms.track.shard_digest import shard_digest
from tensortap.rooms.track.torch.reading import is_plain
from tensortap.values.torch.private import version_of
from tensortap.values.torch.summarize import summarize
from tensortap.values.torch.tensors import view


def initial_weights(
    root: nn.Module, parameters: Mapping[str, nn.Parameter], trained: set[int]
) -> Iterator[InitialWeight]:
    """Yield the weights of a model before training, as far as they are in the CPU's memory.

    `trained` has the ids of parameters of optimizers, if any are known.
    """
    stacks = nn.TransformerEncoder, nn.TransformerDecoder  # they copy one layer
    copied = {
        id(each) for layer in root.modules() if isinstance(layer, stacks)
        for each in layer.parameters()
    }  # fmt: skip
    for name, parameter in parameters.items():
        # not on a device, where nobody waits for it; not lazy, quantized or a part of the whole
        if not is_plain(parameter) or not parameter.is_floating_point():
            continue
        number, values = id(parameter), parameter.detach()
        summary = summarize(values)
        assert isinstance(summary, Summary)
        compared = parameter.requires_grad and parameter.ndim > 1 and number not in copied
        is_trained = number in trained or not trained
        digest = shard_digest(view(values)) if compared and is_trained and summary.std else b""
        yield InitialWeight(name, parameter.ndim, summary, digest)


Unregistered = dict[str, list[tuple[weakref.ref[torch.Tensor], int]]]
"""Attributes with parameters that torch does not know, and the versions of these."""


def unregistered_parameters(root: nn.Module) -> Unregistered:
    """Return parameters in plain lists and dicts of modules, and tensors that require gradients."""
    registered = {id(each) for each in (*root.modules(), *root.parameters())}
    found: Unregistered = {}
    for name, module in root.named_modules():
        for attribute, value in vars(module).items():
            if type(value) not in (list, tuple, dict, torch.Tensor):
                continue
            if type(value) is not torch.Tensor and len(value) > 10_000:  # data, not modules
                continue
            for _, item in tensors_in(value, (nn.Module, torch.Tensor)):
                own = [item] if isinstance(item, torch.Tensor) else item.parameters()
                leaves = (p for p in own if p.requires_grad and p.is_leaf)
                new = [p for p in leaves if id(p) not in registered]
                if new and id(item) not in registered:
                    versions = [(weakref.ref(p), version_of(p)) for p in new]
                    found.setdefault(f"{name}.{attribute}".lstrip("."), []).extend(versions)
    return found


def left_out(found: Unregistered, optimized: set[int]) -> tuple[tuple[str, int], ...]:
    """Return attributes whose parameters get gradients, and are not changed; and how many."""
    counts = (
        (title, sum(_is_left(parameter(), version, optimized) for parameter, version in parameters))
        for title, parameters in found.items()
    )
    return tuple((title, count) for title, count in counts if count)


def _is_left(parameter: torch.Tensor | None, version: int, optimized: set[int]) -> bool:
    if parameter is None or parameter.grad is None or id(parameter) in optimized:
        return False
    return version_of(parameter) == version


def repeated_layers(root: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return lists in which one layer with weights appears several times, and how often."""
    found = []
    for name, module in root.named_modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            held = module._modules.values()  # iterating over it may run code of the user
            layers = collections.Counter(id(each) for each in held if _has_weights(each))
            most = max(layers.values(), default=0)
            if most > 1:
                found.append((name or type(module).__name__, most))
    return tuple(found)


def _has_weights(module: nn.Module | None) -> bool:
    return module is not None and next(module.parameters(), None) is not None
