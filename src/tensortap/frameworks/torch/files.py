"""Files of torch: ``.pt``, and tensors embedded in pickles."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch


def save(value: Any, path: Path) -> None:
    """Write a tensor, or an object with tensors in it."""
    torch.save(value, path)


def load(file: Path | BinaryIO, trust: bool, mapped: bool) -> Any:
    """Return the contents of a file, on the CPU; `mapped` tensors stay in the file."""
    # only zip archives can be mapped, which is what torch writes since 1.6
    mapped = mapped and zipfile.is_zipfile(file)
    return torch.load(file, map_location="cpu", weights_only=not trust, mmap=mapped)


def reduction(value: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return what a pickle holds instead of a tensor; None for other values.

    The reduction of torch itself cannot read float8, and trusts the bytes that it reads.
    """
    if not isinstance(value, torch.Tensor):
        return None
    data = io.BytesIO()
    torch.save(value, data)
    return torch.load, (io.BytesIO(data.getvalue()),)
