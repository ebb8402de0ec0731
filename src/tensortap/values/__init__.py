"""Everything that knows a framework, behind one protocol.

Importing this package imports no framework; `registry` finds those that the user has imported.
"""

from __future__ import annotations

from tensortap.core.dtypes import itemsize, numpy_dtype
from tensortap.stats.digest import digest
from tensortap.values.protocol import SMALL
from tensortap.values.rebuild import rebuild
from tensortap.values.snapshot import (
    describe,
    digest_of,
    memory_of,
    nbytes_of,
    snapshot,
    summary_of,
)

__all__ = [
    "SMALL",
    "describe",
    "digest",
    "digest_of",
    "itemsize",
    "memory_of",
    "nbytes_of",
    "numpy_dtype",
    "rebuild",
    "snapshot",
    "summary_of",
]
