"""Descriptions of torch tensors, which are kept from step to step."""

import torch

from tensortap.core.record import Kind, Shard
from tensortap.rooms.track.torch.descriptions import Descriptions, observed


def test_a_description_is_kept_until_anything_in_it_changes():
    descriptions = Descriptions()
    x, shard = torch.ones(2, 3), Shard((4, 3), (0, 0))
    cases = [
        (x, "torch.nn.Linear", {}, None),
        (x.T, "torch.nn.Linear", {}, None),
        (x.double(), "torch.nn.Linear", {}, None),
        (x, "torch.nn.GELU", {}, None),
        (x, "torch.nn.GELU", {"mode": "eval"}, None),
        (x, "torch.nn.GELU", {}, shard),
    ]
    for tensor, type_name, tags, part in cases:
        seen = "fc", Kind.ACTIVATION, tensor, 0, type_name, tags, part
        first, second = descriptions.observed(*seen), descriptions.observed(*seen)
        assert first[0] == second[0] == observed(*seen)[0]
        assert first[0] is second[0]


def test_a_kept_description_comes_with_the_tensor_of_this_time():
    descriptions = Descriptions()
    descriptions.observed("fc", Kind.WEIGHT, torch.zeros(2))
    weight = torch.nn.Parameter(torch.ones(2))
    local = descriptions.observed("fc", Kind.WEIGHT, weight)[1]
    assert local.data_ptr() == weight.data_ptr()
    assert not local.requires_grad
