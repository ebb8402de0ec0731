"""Names of modules and parameters do not contain wrappers."""

import pytest
import torch
from torch import nn

from tensortap.rooms.track.torch.names import Names, unwrapped


def names_of(model):
    names = Names(model)
    return [n for n, _ in names.modules()], [n for n, _ in names.parameters()]


class HasModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


PLAIN = (["HasModule", "module"], ["module.weight", "module.bias"])
WRAPPERS = [
    lambda m: m,
    nn.DataParallel,
    lambda m: torch.compile(m, backend="eager"),
    lambda m: nn.DataParallel(torch.compile(m, backend="eager")),
    lambda m: torch.compile(nn.DataParallel(nn.DataParallel(m)), backend="eager"),
]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_names_do_not_contain_outer_wrappers(wrap):
    model = HasModule()
    assert names_of(wrap(model)) == PLAIN
    assert unwrapped(wrap(model)) is model


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_names_do_not_contain_inner_wrappers(wrap):
    model = nn.Sequential(nn.Linear(2, 2), wrap(HasModule()))
    assert names_of(model) == (
        ["Sequential", "0", "1", "1.module"],
        ["0.weight", "0.bias", "1.module.weight", "1.module.bias"],
    )


def test_checkpoint_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    assert names_of(model) == (["Sequential", "0"], ["0.weight", "0.bias"])
