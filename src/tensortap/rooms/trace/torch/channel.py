"""Messages between the ranks of a torch.distributed group, over connections of our own.

A process group of our own is made from the store of the user's group, which releases of torch
before `ProcessGroup.get_group_store` do not give out: there every rank keeps what it traces.
`new_group` would need every rank of the job, whoever traces, and it reuses the name of a group that
was destroyed, under which the store still has stale addresses.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import distributed

from tensortap.values.torch import private
from tensortap.values.torch.tensors import quiet

# how many channels there were between the same ranks: all ranks count alike
_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def open_channel(group: Any) -> GlooChannel | None:
    """Connect the ranks of a group; None if this rank has no group or is alone in it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        return None
    group = group or distributed.group.WORLD
    members = distributed.get_process_group_ranks(group)
    return GlooChannel.connect(group, members) if len(members) > 1 else None


class GlooChannel:
    """Sends bytes to the first rank of a group, and receives them there."""

    def __init__(self, line: Any, members: list[int], rank: int) -> None:
        self._line = line
        self._members = members
        self.is_first = rank == members[0]
        self.others = members[1:]
        """All ranks but the first."""

    @classmethod
    def connect(cls, group: Any, members: list[int]) -> GlooChannel:
        """Connect these ranks with the timeout of their group."""
        key = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        name = f"tensortap/{key}/{next(_numbers[key])}"
        store = distributed.PrefixStore(name, group.get_group_store())
        rank = distributed.get_rank()
        timeout = private.timeout_of(group)
        line = distributed.ProcessGroupGloo(store, members.index(rank), len(members), timeout)
        return cls(line, members, rank)

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the user's modes do not see what is sent."""
        return quiet()

    def on_host(self, value: Any) -> Any:
        """Return a tensor in the memory of the host; any other value as it is."""
        return value.cpu() if isinstance(value, torch.Tensor) and not value.is_cpu else value

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes to the first rank."""
        view = numpy.frombuffer(data, numpy.uint8)
        if not view.nbytes:
            return
        # by its address, because torch.frombuffer would warn about memory that is read-only
        memory = (ctypes.c_char * view.nbytes).from_address(view.ctypes.data)
        self._line.send([torch.frombuffer(memory, dtype=torch.uint8)], 0, 0).wait()

    def receive(self, rank: int, size: int) -> memoryview:
        """Receive this many bytes."""
        if not size:
            return memoryview(b"")
        tensor = torch.empty(size, dtype=torch.uint8)
        self._line.recv([tensor], self._members.index(rank), 0).wait()
        return memoryview(tensor.numpy())

    def close(self) -> None:
        """Disconnect."""
        self._line = None
