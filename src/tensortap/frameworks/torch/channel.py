"""Messages between the ranks of a torch.distributed group, over connections of our own.

A process group of our own is made from the user's store. `new_group` would need every rank of the
job, whoever traces, and it reuses the name of a group that was destroyed, under which the store
still has stale addresses.
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

from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.tensors import quiet

# how many channels there were between the same ranks: all ranks count alike
_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def open_channel(group: Any) -> GlooChannel | None:
    """Connect the ranks of a group; None if this rank has no group or is alone in it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        return None
    members = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    return GlooChannel.connect(group, members) if len(members) > 1 else None


class GlooChannel:
    """Sends bytes to the first rank of a group, and receives them there."""

    def __init__(self, line: Any, members: list[int], rank: int, device: torch.device) -> None:
        self._line = line
        self._members = members
        self._device = device
        self.is_first = rank == members[0]
        self.others = members[1:]

    @classmethod
    def connect(cls, group: Any, members: list[int]) -> GlooChannel:
        """Connect these ranks with the timeout of their group, over gloo if it is available."""
        backend = "gloo" if distributed.is_gloo_available() else "nccl"
        make = distributed.ProcessGroupGloo if backend == "gloo" else distributed.ProcessGroupNCCL
        key = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
        name = f"tensortap/{key}/{next(_numbers[key])}"
        store = distributed.PrefixStore(name, private.default_store())
        rank = distributed.get_rank()
        timeout = private.timeout_of(group or distributed.group.WORLD)
        line = make(store, members.index(rank), len(members), timeout)
        return cls(line, members, rank, device_for(backend))

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which no mode of the user sees what is sent."""
        return quiet()

    def on_host(self, value: Any) -> Any:
        """Return a tensor on the CPU; any other value as it is."""
        return value.cpu() if isinstance(value, torch.Tensor) and not value.is_cpu else value

    def send_numbers(self, *numbers: int) -> None:
        """Send two integers to the first rank."""
        self._send(torch.tensor(numbers, dtype=torch.int64, device=self._device))

    def receive_numbers(self, rank: int) -> list[int]:
        """Receive two integers."""
        tensor = torch.empty(2, dtype=torch.int64, device=self._device)
        numbers: list[int] = self._receive(tensor, rank).tolist()
        return numbers

    def send(self, data: memoryview) -> None:
        """Send bytes to the first rank."""
        if data.nbytes:
            self._send(_tensor_over(data).to(self._device))

    def receive(self, rank: int, size: int) -> memoryview:
        """Receive this many bytes."""
        if not size:
            return memoryview(b"")
        tensor = torch.empty(size, dtype=torch.uint8, device=self._device)
        return memoryview(self._receive(tensor, rank).numpy())

    def close(self) -> None:
        """Disconnect."""
        self._line = None

    def _send(self, tensor: Any) -> None:
        self._line.send([tensor], 0, 0).wait()

    def _receive(self, tensor: Any, rank: int) -> Any:
        self._line.recv([tensor], self._members.index(rank), 0).wait()
        return tensor.cpu()


def device_for(backend: str) -> torch.device:
    """Return the device whose memory a backend sends."""
    kind = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}.get(backend)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, getattr(torch, kind).current_device())


def _tensor_over(data: memoryview) -> torch.Tensor:
    """Return a tensor over memory that is only read; torch.frombuffer would warn about it."""
    address = numpy.frombuffer(data, numpy.uint8).__array_interface__["data"][0]
    memory = (ctypes.c_char * data.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)
