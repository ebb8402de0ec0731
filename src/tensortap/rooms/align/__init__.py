"""Align: do a trainer and an inference engine hold the same weights and compute the same?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.rooms.align.digest import Digest, load_digest, recorded_digests
    from tensortap.rooms.align.tolerance import ToleranceReport
    from tensortap.rooms.align.weights import WeightsReport

__all__ = ["Digest", "ToleranceReport", "WeightsReport", "load_digest", "recorded_digests"]
__getattr__ = lazy(
    __name__,
    {
        "Digest": "tensortap.rooms.align.digest:Digest",
        "ToleranceReport": "tensortap.rooms.align.tolerance:ToleranceReport",
        "WeightsReport": "tensortap.rooms.align.weights:WeightsReport",
        "load_digest": "tensortap.rooms.align.digest:load_digest",
        "recorded_digests": "tensortap.rooms.align.digest:recorded_digests",
    },
)
