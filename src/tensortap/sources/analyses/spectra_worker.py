"""The process that computes spectra, so that training does not wait for them.

It reads jobs from its standard input: for each matrix a line with its name, dtype and shape, then
its bytes before and after the update, and at the end ``null``. It writes results to its standard
output, one per line.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import numpy as np

from tensortap.dtypes import numpy_dtype
from tensortap.stats.spectra import spectrum


def main() -> None:
    """Compute spectra until the training process closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = sys.stdin.buffer
    for line in pipe:
        if (head := json.loads(line)) is None:
            _write(None)
            continue
        name, dtype, rows, columns = head
        of = np.dtype(numpy_dtype(dtype))
        data = pipe.read(2 * rows * columns * of.itemsize)
        if len(data) < 2 * rows * columns * of.itemsize:
            return  # the training process has ended
        before, after = np.frombuffer(data, of).reshape(2, rows, columns)
        numbers = _figures("", after)
        moved = after.astype(np.float64) - before.astype(np.float64)
        numbers |= _figures("update_", moved)
        _write([name, numbers])


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
