"""Track: the numerics of a whole model.

Other rooms plug in: ``track.listeners`` and ``track.analyses`` look at the steps of torch models
(see `TrackListener`), ``track.hooks`` are functions of hooks, model and observer that return the
hooks to use.
"""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(
    name="track",
)
