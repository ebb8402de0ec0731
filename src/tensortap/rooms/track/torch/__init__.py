"""Tracking of torch models."""

from tensortap.rooms.track.torch.device_digest import digest_later
from tensortap.rooms.track.torch.device_stats import summarize_later
from tensortap.rooms.track.torch.track import hooks_of

__all__ = ["digest_later", "hooks_of", "summarize_later"]
