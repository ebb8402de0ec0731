"""One adapter a framework: recognise a value, take a snapshot of it, rebuild it.

Importing this imports no framework; the modules do that once the user has.
"""

from __future__ import annotations

from tensortap.arrays.adapter import SMALL
from tensortap.arrays.digest import digest, digest_of
from tensortap.arrays.dtypes import itemsize, numpy_dtype
from tensortap.arrays.rebuild import rebuild
from tensortap.arrays.summary import summary_of
from tensortap.arrays.tree import describe, nbytes_of, snapshot

__all__ = [
    "SMALL",
    "describe",
    "digest",
    "digest_of",
    "itemsize",
    "nbytes_of",
    "numpy_dtype",
    "rebuild",
    "snapshot",
    "summary_of",
]
