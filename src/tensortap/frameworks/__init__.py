"""One adapter a framework: recognise a value, take a snapshot of it, rebuild it.

Importing this imports no framework; the modules do that once the user has.
"""

from __future__ import annotations

from tensortap.dtypes import itemsize, numpy_dtype
from tensortap.frameworks.digest import digest, digest_of
from tensortap.frameworks.protocol import SMALL
from tensortap.frameworks.rebuild import rebuild
from tensortap.frameworks.snapshot import describe, nbytes_of, snapshot
from tensortap.frameworks.summary import summary_of

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
