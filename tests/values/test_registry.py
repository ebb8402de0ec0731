"""Parts of a package that are named after frameworks."""

import torch

from tensortap.values.registry import part_named, parts


def test_parts_are_modules_named_after_loaded_frameworks():
    assert torch.Tensor
    names = [part.__name__ for part in parts("tensortap.rooms.ops")]
    assert names[0] == "tensortap.rooms.ops.torch"
    assert set(names) <= {"tensortap.rooms.ops.torch", "tensortap.rooms.ops.jax"}
    assert part_named("tensortap.rooms.ops", "mlx") is None
