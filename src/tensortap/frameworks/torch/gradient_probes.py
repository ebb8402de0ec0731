"""Gradients of named modules and parameters, copied while a step runs."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tensortap.errors import NotFound
from tensortap.frameworks.observing import tensors_in
from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.names import Names
from tensortap.frameworks.torch.tensors import quiet

Take = Callable[[str, Any], None]


@contextlib.contextmanager
def observe_gradients(
    model: torch.nn.Module, patterns: Sequence[str], take: Take
) -> Iterator[None]:
    """Hand copies of gradients to `take`: of outputs of modules, and of parameters."""
    names = Names(model)
    averaged = any(type(each).__name__ == "DistributedDataParallel" for each in model.modules())
    modules, parameters = dict(names.modules()), dict(names.parameters())
    with contextlib.ExitStack() as hooks:
        for name in _matching(patterns, [*modules, *parameters]):
            if name in modules:
                handle = modules[name].register_forward_hook(_on_output(name, take))
            else:
                handle = _hook_parameter(parameters[name], name, take, averaged)
            hooks.callback(handle.remove)
        yield


def _matching(patterns: Sequence[str], names: list[str]) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, names, 3) or names[:3]
            raise NotFound(f"no module or parameter {pattern!r}; there are {', '.join(near)}")
        found.update(dict.fromkeys(matching))
    return list(found)


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    with quiet():
        return gradient.detach().clone()


def _on_output(name: str, take: Take) -> Callable[..., None]:
    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for path, tensor in tensors_in(output, torch.Tensor):
            if tensor.requires_grad:
                tensor.register_hook(_on_gradient(name + path, take))

    return hook


def _on_gradient(name: str, take: Take) -> Callable[[torch.Tensor], None]:
    def hook(gradient: torch.Tensor) -> None:
        take(name, _copy(gradient))

    return hook


def _hook_parameter(parameter: torch.Tensor, name: str, take: Take, averaged: bool) -> Any:
    def read() -> None:
        if parameter.grad is not None:
            take(name, _copy(parameter.grad))

    def hook(owner: torch.Tensor) -> None:
        private.after_backward(read) if averaged else read()

    return parameter.register_post_accumulate_grad_hook(hook)
