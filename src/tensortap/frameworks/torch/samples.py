"""Samples of tensors in the CPU's memory, which rules of steps look at in few steps."""

from __future__ import annotations

import torch

from tensortap.frameworks.torch.tensors import why_not

_OFTEN, _OFTEN_UNTIL, _RARELY = 10, 100, 100  # steps


def is_checked(number: int) -> bool:
    """Return whether values are looked at in a step, counted from where tracking began.

    >>> [number for number in range(400) if is_checked(number)][-5:]
    [80, 90, 100, 200, 300]
    """
    return number % (_OFTEN if number <= _OFTEN_UNTIL else _RARELY) == 0


def is_readable(tensor: object) -> bool:
    """Return whether the values of a tensor are plain memory of the CPU, for which nobody waits."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    assert isinstance(tensor, torch.Tensor)
    return tensor.is_cpu and tensor.numel() > 0 and not why_not(tensor)


def sample(tensor: torch.Tensor, most: int = 1024) -> torch.Tensor:
    """Return a copy of up to `most` values that are spread over a tensor.

    >>> sample(torch.arange(10), 3).tolist()
    [0, 5]
    """
    flat = tensor.detach().reshape(-1)
    # odd, so that not all values of a matrix are from the same column
    return flat[:: -(-len(flat) // most) | 1].clone()
