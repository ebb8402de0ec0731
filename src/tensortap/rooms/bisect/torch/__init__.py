"""Torch models whose tensors are replaced by recorded ones."""

from tensortap.rooms.bisect.torch.grafts import graft

__all__ = ["graft"]
