"""Tracking of torch models."""

from tensortap.rooms.track.torch.device_stats import summarize_later
from tensortap.rooms.track.torch.track import hooks_of

__all__ = ["hooks_of", "summarize_later"]
