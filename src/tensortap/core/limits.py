"""Memory of the machine, and sizes as people write them: ``"50%"``, ``"8GB"``."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import re
import resource

_THREADS = 32  # a data loader takes a few for each of its workers
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


@functools.cache  # a worker's queue looks ten times per second
def _limited_cgroups() -> list[tuple[str, bool, int]]:
    """Return folder, version and limit of each control group that has a limit."""
    found = []
    for folder, version2 in _cgroups():
        limit = _read(f"{folder}/{_CGROUP_FILES[version2][0]}").strip()
        if limit.isdigit() and int(limit) < 1 << 62:  # version 1 says "none" by such a number
            found.append((folder, version2, int(limit)))
    return found


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return limit and use of each control group that has a limit.

    Memory that the kernel can free at once does not count as used.
    """
    found = []
    for folder, version2, limit in _limited_cgroups():
        used = _read(f"{folder}/{_CGROUP_FILES[version2][1]}").strip()
        stat = dict(re.findall(r"^(\w+) (\d+)$", _read(f"{folder}/memory.stat"), re.M))
        total = "" if version2 else "total_"  # with the groups inside it
        names = (f"{total}inactive_file", f"{total}active_file")
        free = sum([int(stat.get(name, 0)) for name in names])
        found.append((limit, int(used) - free if used.isdigit() else 0))
    return found


def _limits() -> list[tuple[int, int]]:
    """Return limit and use of control groups, and of the address space (RLIMIT_AS)."""
    limit, found = resource.getrlimit(resource.RLIMIT_AS)[0], _cgroup_limits()
    if limit != resource.RLIM_INFINITY:
        pages = _read("/proc/self/statm").split()
        found.append((limit, int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0))
    return found


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


def shortage() -> str:
    """Return what this process has too little of for another connection; empty if there is room.

    libzmq aborts the process if it gets no descriptor, thread or memory. A connection takes up to
    17 descriptors, 5 threads and a few MiB; the rest is left to the program and its data loaders.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        free = most - sum(int(fd) < most for fd in os.listdir("/dev/fd"))
    except OSError as error:  # a process that has changed its user may not look
        free = 0 if error.errno in (errno.EMFILE, errno.ENFILE) else most
    if most >= 0 and free < 64:
        return f"only {free} file descriptors are left: raise ulimit -n, which is {most}"
    try:
        mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return "less than 64 MiB of address space is left: raise ulimit -v"
    if not _can_start(_THREADS):
        few = f"fewer than {_THREADS} threads can be started"
        return f"{few}: raise ulimit -u, ulimit -v or pids.max"
    return ""


def _can_start(count: int) -> bool:
    """Return whether so many threads can be there at the same time, by starting them."""
    import ctypes

    # in C: a thread of Python would take 64 MiB of address space for its allocations, and keep it
    libc, end, options = ctypes.CDLL(None), (ctypes.c_long * 8)(), (ctypes.c_long * 16)()
    libc.sem_init(end, 0, 0)
    libc.pthread_attr_init(options)
    libc.pthread_attr_setstacksize(options, ctypes.c_size_t(64 << 10))
    threads = [ctypes.c_void_p() for _ in range(count)]
    started = [
        each for each in threads
        if not libc.pthread_create(ctypes.byref(each), options, libc.sem_wait, end)
    ]  # fmt: skip
    for _ in started:
        libc.sem_post(end)
    for each in started:
        libc.pthread_join(each, None)
    return len(started) == count


def parse_size(text: str | int, argument: str = "size") -> int:
    """Return the bytes of ``"50%"`` (of the memory), ``"8GB"``, ``"512 MiB"`` or a number."""
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
    """Return a size as people read it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
