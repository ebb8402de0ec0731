"""Memory of the machine, and sizes as people write them: ``"50%"``, ``"8GB"``."""

from __future__ import annotations

import functools
import os
import re
import resource

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(%)|([KMGT]?)i?B?)\s*", re.IGNORECASE)


# names of the files of a control group, in versions 2 and 1: limit, use
_CGROUP_FILES = {
    True: ("memory.max", "memory.current"),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def _read(path: str) -> str:
    # not pathlib: importing it takes longer than this whole module
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _cgroups() -> list[tuple[str, bool]]:
    """Return the folders of this process's memory control groups, and whether they are v2.

    A limit of any group above counts as well. In a container the path that the kernel reports
    may not exist below the mount; then the root of the mount is the group of the container.
    """
    folders = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        version2 = not controllers
        if version2 or "memory" in controllers.split(","):
            root = "/sys/fs/cgroup" if version2 else "/sys/fs/cgroup/memory"
            parts = [part for part in path.split("/") if part]
            folders += [
                ("/".join([root, *parts[:length]]), version2)
                for length in range(len(parts), -1, -1)
            ]
    return folders


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return limit and use of each control group that has a limit.

    Memory that the kernel can free at once does not count as used.
    """
    found = []
    for folder, version2 in _cgroups():
        limit, used = (_read(f"{folder}/{name}").strip() for name in _CGROUP_FILES[version2])
        if limit.isdigit():
            inactive = re.search(
                r"^(?:total_)?inactive_file (\d+)$", _read(f"{folder}/memory.stat"), re.M
            )
            free = int(inactive[1]) if inactive else 0
            found.append((int(limit), int(used) - free if used.isdigit() else 0))
    return found


def _address_space() -> tuple[int, int] | None:
    """Return the limit of this process's address space (RLIMIT_AS), and its use."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    pages = _read("/proc/self/statm").split()
    return limit, int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _limits() -> list[tuple[int, int]]:
    space = _address_space()
    return _cgroup_limits() + ([space] if space is not None else [])


@functools.cache
def total_memory() -> int:
    """Return the bytes of memory of the machine, or what this process may have if that is less.

    The limits are those of control groups (containers, Slurm, systemd) and of the address space.
    """
    pages: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([pages, *[limit for limit, _ in _limits()]])


def available_memory() -> int:
    """Return how many bytes can be allocated now without swapping or reaching a limit."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.M)
    free = int(found[1]) * 1024 if found else total_memory()
    return max(0, min([free, *[limit - used for limit, used in _limits()]]))


def has_room(nbytes: int) -> bool:
    """Return whether a twentieth of the memory stays free after allocating `nbytes`."""
    return available_memory() - nbytes >= total_memory() // 20


def parse_size(text: str | int, argument: str = "size") -> int:
    """Return the bytes of ``"50%"`` (of the memory), ``"8GB"``, ``"512 MiB"`` or a number.

    >>> parse_size("512 MiB")
    536870912
    """
    if isinstance(text, int):
        size = text
    else:
        match = _SIZE.fullmatch(str(text))
        if match is None:
            raise ValueError(f"{argument} must look like '8GB', '512MB' or '50%', got {text!r}")
        number, percent, unit = match.groups()
        if percent and float(number) > 100:
            raise ValueError(f"{argument} must be at most 100%, got {text!r}")
        if percent:
            size = int(total_memory() * float(number) / 100)
        else:
            size = int(float(number) * _UNITS[unit.upper()])
    if size <= 0:
        raise ValueError(f"{argument} must be more than 0, got {text!r}")
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
