"""The process that computes spectra, so that training does not wait for them.

It shares memory with the training process, reads jobs from its standard input, one per line, and
writes results to its standard output.
"""

from __future__ import annotations

import json
import mmap
import signal
import sys
from typing import Any

import numpy as np

from tensortap.dtypes import numpy_dtype
from tensortap.stats.spectra import spectrum


def main(fd: int) -> None:
    """Compute spectra until the training process closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    for line in sys.stdin:
        for name, dtype, rows, columns, old, new in json.loads(line):
            count = rows * columns
            before, after = (
                np.frombuffer(memory, numpy_dtype(dtype), count, at).reshape(rows, columns)
                for at in (old, new)
            )
            numbers = _figures("", after)
            moved = after.astype(np.float64) - before.astype(np.float64)
            numbers |= _figures("update_", moved)
            _write([name, numbers])
        _write(None)


def _write(result: object) -> None:
    sys.stdout.write(f"{json.dumps(result)}\n")
    sys.stdout.flush()


def _figures(prefix: str, matrix: Any) -> dict[str, float]:
    found = spectrum(matrix)
    if found is None:
        return {}
    numbers = {
        f"{prefix}spectral_norm": found.largest,
        f"{prefix}stable_rank": found.stable_rank,
        f"{prefix}effective_rank": found.effective_rank,
    }
    if found.captured < 1:
        numbers[f"{prefix}spectrum_captured"] = found.captured
    return numbers
