"""Torch models, tensors and process groups as `trace` needs them."""

from tensortap.rooms.trace.torch.channel import open_channel
from tensortap.rooms.trace.torch.stack import stack
from tensortap.rooms.trace.torch.trace_models import (
    children,
    closed,
    compiled,
    hook_root,
    in_backward,
    is_common,
    is_model,
    model_inside,
)

__all__ = [
    "children",
    "closed",
    "compiled",
    "hook_root",
    "in_backward",
    "is_common",
    "is_model",
    "model_inside",
    "open_channel",
    "stack",
]
