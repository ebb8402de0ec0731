"""Watch: your own code on live tensors, in a worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.values.view import array_of

__all__ = ["array_of"]
__getattr__ = lazy(__name__, {"array_of": "tensortap.values.view:array_of"})
