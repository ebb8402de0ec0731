"""Provenance: everything that is needed to run a program again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.rooms.provenance.collect import Keeper, collect
    from tensortap.rooms.provenance.redact import Redactor
    from tensortap.rooms.provenance.reproduce import Reproduced, reproduce
    from tensortap.runs.init import update_metadata

__all__ = ["Keeper", "Redactor", "Reproduced", "collect", "reproduce", "update_metadata"]
__getattr__ = lazy(
    __name__,
    {
        "Keeper": "tensortap.rooms.provenance.collect:Keeper",
        "Redactor": "tensortap.rooms.provenance.redact:Redactor",
        "Reproduced": "tensortap.rooms.provenance.reproduce:Reproduced",
        "collect": "tensortap.rooms.provenance.collect:collect",
        "reproduce": "tensortap.rooms.provenance.reproduce:reproduce",
        "update_metadata": "tensortap.runs.init:update_metadata",
    },
)
