"""Everything that is needed to run a program again, and `reproduce`, which does so."""

from __future__ import annotations

from tensortap.rooms.provenance.collect import Keeper, collect
from tensortap.rooms.provenance.redact import Redactor
from tensortap.rooms.provenance.reproduce import Reproduced, reproduce

__all__ = ["Keeper", "Redactor", "Reproduced", "collect", "reproduce"]
