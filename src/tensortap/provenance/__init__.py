"""Everything that is needed to run a program again, and `reproduce`, which does so."""

from __future__ import annotations

from tensortap.provenance.collect import Keeper, collect
from tensortap.provenance.redact import Redactor
from tensortap.provenance.reproduce import Reproduced, reproduce

__all__ = ["Keeper", "Redactor", "Reproduced", "collect", "reproduce"]
