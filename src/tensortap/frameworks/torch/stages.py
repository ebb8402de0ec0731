"""Stages of torch.distributed.pipelining: the one that is running, and where others are."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import distributed


def has_pipelines() -> bool:
    """Return whether the program may have pipeline stages."""
    return "torch.distributed.pipelining.stage" in sys.modules


def current_stage() -> Any:
    """Return the pipeline stage that calls the current module; None if there is none.

    Buys: the output of an inner stage is not taken for the output of the model, and the inputs of
    stages are compared. Otherwise it is, and they are not.
    """
    frame: FrameType | None = sys._getframe(1) if has_pipelines() else None
    while frame is not None:
        if frame.f_code.co_name == "forward_maybe_with_nosync":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def is_inner_stage() -> bool:
    """Return whether a pipeline stage that is not the last one calls the current module."""
    return not getattr(current_stage(), "is_last", True)


def ranks_of_stages(stage: Any, *indices: int) -> tuple[int, ...]:
    """Return the ranks that have some stages of a pipeline; none if there is no such stage."""
    places = [stage.stage_index_to_group_rank.get(index) for index in indices]
    if None in places:
        return ()
    group = stage.group or distributed.group.WORLD
    ranks = {distributed.get_global_rank(group, place) for place in places}
    return tuple(sorted(ranks))
