"""Tensors that a collective is still computing: hooks never wait for them."""

import types

import torch

from tensortap.rooms.track.torch import internals
from tensortap.rooms.track.torch.gradients import CHANGED, Collectives


class Running(torch.Tensor):
    """A result that nobody has waited for, as torch's functional collectives return it."""

    completed = False

    @property
    def elem(self):
        return self.as_subclass(torch.Tensor)


def test_results_are_observed_once_the_program_has_used_them():
    observer = types.SimpleNamespace(unseen={}, fault=None)
    collectives, seen = Collectives(observer), []
    collectives.observe(torch.ones(1), "plain", lambda: seen.append("plain"))
    tensors = {name: torch.ones(2).as_subclass(Running) for name in "abcdefg"}
    for name, tensor in tensors.items():
        collectives.observe(tensor, name, lambda name=name: seen.append(name))
    assert seen == ["plain"]
    tensors["a"].completed = True
    collectives.poll()
    assert seen == ["plain", "a", "b", "c"]  # at most four wait: each is memory
    with torch.no_grad():
        tensors["d"].add_(1)
    collectives.poll(most=0)
    assert seen == ["plain", "a", "b", "c", "e", "f", "g"]
    assert observer.unseen == {"d": CHANGED}


def test_releases_of_torch_without_these_attributes():
    tensor = torch.ones(2)
    assert internals.running_collective(torch.nn.Parameter(tensor)) is None
    assert internals.result_of(tensor) is tensor
    assert internals.module_calls() == []  # outside of any module
    assert internals.base_of(tensor) is None
    assert internals.base_of(tensor[1:]) is tensor
    assert internals.base_of(object()) is None
