"""Track: the numerics of a whole model.

Other rooms plug in: ``track.listeners`` look at the steps of torch models, ``track.option.NAME``
does so if `track` gets an option of that name (see `TrackListener`), ``track.hooks`` are
functions of hooks, model and observer that return the hooks to use, and ``track.origins`` is a
function of a model that returns what finds where a NaN was made.
"""

from __future__ import annotations

from tensortap.rooms import Room

ROOM = Room(name="track")
