"""Programs that have little left of what the system gives."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import mmap
import os
import resource

from tensortap.live import keys


def leave_threads(left):
    """Let this process start no more than so many threads, as its user and as root."""
    if not os.geteuid():
        # the limit holds for no root, nor for who has these rights; this user may read no key
        os.environ["TENSORTAP_KEY"] = keys.key_path().read_text()
        os.setresuid(54321 + os.getpid(), 0, 0)
        libc, head = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)
        rights = (ctypes.c_uint32 * 6)()
        assert libc.capget(head, rights) == 0
        for right in (21, 24):  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
            rights[0] &= ~(1 << right)
        assert libc.capset(head, rights) == 0
    running = 0
    for task in glob.glob("/proc/[0-9]*/task/*/status"):
        with contextlib.suppress(OSError), open(task) as file:
            running += f"\nUid:\t{os.getuid()}\t" in file.read()
    resource.setrlimit(resource.RLIMIT_NPROC, (running + left,) * 2)


def leave_memory(left):
    """Leave this process so many MiB of address space."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (left << 20), -1))


def descriptors():
    """Return the open file descriptors."""
    return list(map(int, os.listdir("/proc/self/fd")))


def leave_descriptors(left):
    """Leave this process so many descriptors; return those that take the others."""
    number = max(descriptors()) + 1200  # select takes none above 1023
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
    held = []
    while len(descriptors()) < number:
        held.append(os.dup(0))
    for _ in range(left):
        os.close(held.pop())
    return held


LEAVE = {"descriptors": leave_descriptors, "MiB": leave_memory, "threads": leave_threads}
