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
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
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
        return quiet()

    def on_host(self, value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) and not value.is_cpu else value

    def send(self, data: bytes | memoryview) -> None:
        view = numpy.frombuffer(data, numpy.uint8)
        if not view.nbytes:
            return
        # by its address, because torch.frombuffer would warn about memory that is read-only
        memory = (ctypes.c_char * view.nbytes).from_address(view.ctypes.data)
        self._line.send([torch.frombuffer(memory, dtype=torch.uint8)], 0, 0).wait()

    def receive(self, rank: int, size: int) -> memoryview:
        if not size:
            return memoryview(b"")
        tensor = torch.empty(size, dtype=torch.uint8)
        self._line.recv([tensor], self._members.index(rank), 0).wait()
        return memoryview(tensor.numpy())

    def close(self) -> None:
        self._line = None


def open_store() -> Callable[[str], TorchStore] | None:
    """Return what opens a store of all ranks; None if there is no process group."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    group = distributed.group.WORLD
    if distributed.get_world_size() < 2 or not hasattr(group, "get_group_store"):
        return None
    return functools.partial(TorchStore, group)


class TorchStore:
    """Bytes in the store of the default group, over a connection of our own."""

    def __init__(self, group: Any, name: str) -> None:
        store = group.get_group_store()
        # releases without `clone` share the connection, with short operations only
        store = store.clone() if hasattr(store, "clone") else store
        self._store = distributed.PrefixStore(f"tensortap/{name}", store)
        self.rank = distributed.get_rank()
        self.ranks = tuple(distributed.get_process_group_ranks(group))

    def put(self, key: str, data: bytes) -> None:
        self._store.set(key, data)

    def get(self, keys: Sequence[str]) -> list[bytes] | None:
        if not self._store.check(list(keys)):
            return None
        return [bytes(self._store.get(key)) for key in keys]

    def delete(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # stores that cannot
            self._store.delete_key(key)
