"""Tracking of JAX programs."""

from tensortap.rooms.track.jax.track import hooks_of

__all__ = ["hooks_of"]
