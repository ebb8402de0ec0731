"""Memory of the machine, and sizes as people write them: ``"50%"``, ``"8GB"``."""

from __future__ import annotations

import functools
import os
import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(%)|([KMGT]?)i?B?)\s*", re.IGNORECASE)


def _cgroup_limit() -> int | None:
    """Return the memory limit of the container, if there is one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit():
            return int(text)
    return None


def _read(path: str) -> str:
    # not pathlib: importing it takes longer than this whole module
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _cgroup_used() -> int:
    """Return the memory that the container uses and cannot free at once."""
    for folder, current in (
        ("/sys/fs/cgroup", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.usage_in_bytes"),
    ):
        text = _read(f"{folder}/{current}").strip()
        if text.isdigit():
            found = re.search(
                r"^(?:total_)?inactive_file (\d+)$", _read(f"{folder}/memory.stat"), re.M
            )
            return int(text) - (int(found[1]) if found else 0)
    return 0


@functools.cache
def total_memory() -> int:
    """Return the bytes of memory of the machine, or of the container if that has fewer."""
    pages: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_limit()
    return pages if limit is None else min(pages, limit)


def available_memory() -> int:
    """Return how many bytes can be allocated now without swapping."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.M)
    free = int(found[1]) * 1024 if found else total_memory()
    limit = _cgroup_limit()
    # the container may have less than the machine
    return free if limit is None else max(0, min(free, limit - _cgroup_used()))


def parse_size(text: str | int) -> int:
    """Return the bytes of ``"50%"`` (of the memory), ``"8GB"``, ``"512 MiB"`` or a number.

    >>> parse_size("512 MiB")
    536870912
    """
    if isinstance(text, int):
        size = text
    else:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(f"size must look like '8GB', '512MB' or '50%', got {text!r}")
        number, percent, unit = match.groups()
        if percent:
            size = int(total_memory() * float(number) / 100)
        else:
            size = int(float(number) * _UNITS[unit.upper()])
    if size <= 0:
        raise ValueError(f"size must be more than 0, got {text!r}")
    return size


def format_size(size: float) -> str:
    """Return a size as people read it.

    >>> format_size(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
