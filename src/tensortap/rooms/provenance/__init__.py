"""Provenance: everything that is needed to run a program again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortap.core.rooms import lazy

if TYPE_CHECKING:
    from tensortap.rooms.provenance.keeper import Keeper, collect
    from tensortap.rooms.provenance.redact import Redactor
    from tensortap.rooms.provenance.reproduction import Reproduced, reproduce
    from tensortap.runs.init import update_metadata

__all__ = ["Keeper", "Redactor", "Reproduced", "collect", "reproduce", "update_metadata"]
__getattr__ = lazy(
    __name__,
    {
        "Keeper": "tensortap.rooms.provenance.keeper:Keeper",
        "Redactor": "tensortap.rooms.provenance.redact:Redactor",
        "Reproduced": "tensortap.rooms.provenance.reproduction:Reproduced",
        "collect": "tensortap.rooms.provenance.keeper:collect",
        "reproduce": "tensortap.rooms.provenance.reproduction:reproduce",
        "update_metadata": "tensortap.runs.init:update_metadata",
    },
)
