"""Updates as they follow from the state of an optimizer, for weights that are too large to copy.

They are those of exact arithmetic: the optimizer rounds each weight, which is not seen here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tensortap.frameworks.torch.shards import local_part

CHUNK = 1 << 20
"""Elements of which the update is computed at once, in float64."""

Chunk = Mapping[str, torch.Tensor]
"""The same elements of the weight after the step, its gradient and its state, by name."""


def derived_update(optimizer: Any, parameter: torch.nn.Parameter) -> Iterator[Any] | None:
    """Return the update of the last step in chunks; None if the optimizer is not known.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> weight.grad, optimizer = torch.ones(3), torch.optim.SGD([weight], lr=0.5)
    >>> optimizer.step()
    >>> [chunk.tolist() for chunk in derived_update(optimizer, weight)]
    [[-0.5, -0.5, -0.5]]
    """
    rule = _RULES.get(type(optimizer))
    groups = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    group, state = next(groups, None), optimizer.state.get(parameter, {})
    skipped = getattr(optimizer, "found_inf", None)
    if rule is None or group is None or parameter.grad is None or (skipped and bool(skipped)):
        return None
    if rule is _adam and "exp_avg" not in state:
        return None
    given = {"weight": parameter, "gradient": parameter.grad, **state}
    tensors = {
        name: local_part(each.detach())
        for name, each in given.items()
        if isinstance(each, torch.Tensor) and each.shape == parameter.shape
    }
    if not all(each.is_cpu and each.is_contiguous() for each in tensors.values()):
        return None
    return _chunks(rule, group, state, tensors)


def _chunks(
    rule: Callable[..., torch.Tensor], group: Any, state: Any, tensors: Chunk
) -> Iterator[Any]:
    flat = {name: each.view(-1) for name, each in tensors.items()}
    for start in range(0, flat["weight"].numel(), CHUNK):
        with torch.no_grad():
            part = {name: each[start : start + CHUNK].double() for name, each in flat.items()}
            yield rule(group, state, part).numpy()


def _sgd(group: Any, state: Any, part: Chunk) -> torch.Tensor:
    rate, decay, momentum = (float(group[key]) for key in ("lr", "weight_decay", "momentum"))
    if momentum and not group["nesterov"]:
        return -rate * part["momentum_buffer"]
    move = -part["gradient"] if group["maximize"] else part["gradient"]
    if momentum:
        move = move + momentum * part["momentum_buffer"]
    return _decayed(part["weight"], rate * move, rate * decay)


def _adam(group: Any, state: Any, part: Chunk) -> torch.Tensor:
    rate, (beta1, beta2), step = float(group["lr"]), group["betas"], float(state["step"])
    second = part["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    size = second.sqrt() / math.sqrt(1 - float(beta2) ** step) + group["eps"]
    move = rate / (1 - float(beta1) ** step) * part["exp_avg"] / size
    decoupled = group.get("decoupled_weight_decay", False)
    return _decayed(part["weight"], move, rate * group["weight_decay"] if decoupled else 0.0)


def _decayed(new: torch.Tensor, move: torch.Tensor, decay: float) -> torch.Tensor:
    """Return the update that has led to a weight by a move and by decay.

    >>> _decayed(torch.tensor(7.0), torch.tensor(1.0), 0.2)  # from 10
    tensor(-3.)
    """
    return -move - decay * (new + move) / (1 - decay)


_RULES: dict[type, Callable[..., torch.Tensor]] = {
    torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam,
}  # fmt: skip
