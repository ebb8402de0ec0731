"""Track: the numerics of a whole model.

Other rooms plug in: ``track.listeners`` look at the steps of torch models, ``track.option.NAME``
does so if `track` gets an option of that name (see `TrackListener`), and ``track.hooks`` are
functions of hooks, model and observer that return the hooks to use.
"""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(name="track")
