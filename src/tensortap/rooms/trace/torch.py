"""Torch in `trace`: models as targets, stacked tensors, and messages between ranks."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import datetime
import hashlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import distributed
from torch.overrides import has_torch_function
from xxhash import xxh3_128_digest

from tensortap.rooms.trace.results import (
    COMPACT,
    KEYED,
    array_of_numbers,
    corner,
    no_common_dtype,
    padded_shape,
)
from tensortap.rooms.track.torch.hooks import ModuleHook, hook_module
from tensortap.rooms.track.torch.internals import compiled_modules
from tensortap.rooms.track.torch.names import unwrapped
from tensortap.values.protocol import SMALL
from tensortap.values.torch import private
from tensortap.values.torch.tensors import KNOWN, address_of, dtype_name, is_lazy, quiet
from tensortap.values.view import memory_at, read

_LARGE = 1 << 20  # bytes; larger tensors are copied only if they have changed
_WRAPPERS = ("_forward_module", "module")  # of trainers whose wrapper classes are not known


def is_model(target: object) -> bool:
    return isinstance(target, torch.nn.Module)


def is_common(cls: type, name: str) -> bool:
    """Return whether a method comes from torch and is no forward."""
    if cls is torch.nn.Module:
        return True
    return cls.__module__.partition(".")[0] == "torch" and name != "forward"


def model_inside(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside all wrappers: DDP, DataParallel, torch.compile, FSDP, trainers'."""
    while True:
        module = unwrapped(module)
        children = list(module.named_children())
        is_wrapper = len(children) == 1 and children[0][0] in _WRAPPERS
        if not is_wrapper or next(module.parameters(recurse=False), None) is not None:
            return module
        module = children[0][1]


def children(owner: Any, others: Callable[[Any], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the modules in a module, without wrappers; `others` lists those in other objects."""
    if is_model(owner):
        modules = owner.named_modules(remove_duplicate=False)
        named = {name: child for name, child in modules if name and "." not in name}
    else:
        named = dict(others(owner))
    return {
        name: model_inside(child) if is_model(child) else child for name, child in named.items()
    }


def closed(owner: Any) -> str | None:
    """Return why the functions of an object cannot be traced; None if they can."""
    if isinstance(owner, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return "it is TorchScript, which runs no Python: trace the model that it was made from"
    return None


def compiled(target: Any) -> frozenset[int]:
    """Return the ids of the modules of a target that run inside compiled graphs."""
    found = compiled_modules(target) if is_model(target) else []
    return frozenset(id(inner) for module in found for inner in module.modules())


def in_backward() -> bool:
    """Return whether a backward pass is running in this thread."""
    return private.backward_pass() != -1


def hook_root(
    module: torch.nn.Module,
    begin: Callable[[torch.nn.Module], None],
    end: Callable[[], None] | None,
) -> contextlib.ExitStack:
    """Call `begin` before each call of the traced model and `end` after it, until closed."""
    hooks = contextlib.ExitStack()
    hooks.callback(hook_module(module, ModuleHook(lambda *args: begin(module)), before=True))
    if end is not None:
        hooks.callback(hook_module(module, ModuleHook(lambda *args: end()), always_call=True))
    return hooks


# -- stacked tensors ----------------------------------------------------------------------


def stack(name: str, values: list[Any]) -> torch.Tensor | None:
    """Return tensors or numbers stacked along a new first dimension, padded with zeros."""
    if not all(isinstance(value, torch.Tensor) for value in values):
        numbers = array_of_numbers(values)
        return None if numbers is None else torch.from_numpy(numbers)
    with quiet(), torch.inference_mode(False):
        dtype, device = values[0].dtype, values[0].device
        if any(value.dtype != dtype for value in values):
            raise no_common_dtype(name, {value.dtype for value in values})
        shape = padded_shape([tuple(value.shape) for value in values])
        stacked = torch.zeros((len(values), *shape), dtype=dtype, device=device)
        for row, value in zip(stacked, values, strict=True):
            corner(row, tuple(value.shape)).copy_(value.detach())
        return stacked


# -- ranks --------------------------------------------------------------------------------

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
    """Sends bytes to the first rank of a group, and receives them there, over our own connections.

    A process group of our own is made from the store of the user's group, which releases of torch
    before `ProcessGroup.get_group_store` do not give out: there every rank keeps what it traces.
    `new_group` would need every rank of the job, whoever traces, and it reuses the name of a group
    that was destroyed, under which the store still has stale addresses.
    """

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
        timeout = timeout_of(group)
        line = distributed.ProcessGroupGloo(store, members.index(rank), len(members), timeout)
        return cls(line, members, rank)

    quiet = staticmethod(quiet)  # the user's modes do not see what is sent

    def on_host(self, value: Any) -> Any:
        """Return a tensor in the memory of the host; any other value as it is."""
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


def timeout_of(group: Any) -> datetime.timedelta:
    """Return the timeout of a process group.

    Buys: gathering waits as long as the user's own collectives. Otherwise as long as torch's do by
    default.
    """
    for device in ("cpu", "cuda"):
        with contextlib.suppress(Exception):  # no backend for that device, or no options
            timeout = group._get_backend(torch.device(device)).options._timeout
            if isinstance(timeout, datetime.timedelta):
                return timeout
    return datetime.timedelta(minutes=30)


class CompactTensor(NamedTuple):
    """A small tensor as its bytes; equal to the key that other ways of comparing tensors make."""

    kind: type
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> torch.Tensor:
        with quiet(), torch.inference_mode(False):
            flat = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
            return flat.view(getattr(torch, self.dtype)).view(self.shape)


def keyed_copy(value: torch.Tensor) -> tuple[Hashable, Any] | None:
    """Return a key that tells whether a tensor has changed, and a copy of it.

    None for tensors that need a closer look, and for large ones: those are copied only if they
    have changed.

    >>> keyed_copy(torch.ones(2))[0].data.hex()
    '0000803f0000803f'
    """
    # even reading an attribute would run a mode
    if has_torch_function((value,)) or private.has_dispatch_modes():
        return None
    try:
        nbytes, dtype = value.nbytes, value.dtype
        if not 0 < nbytes <= _LARGE or not value.is_cpu or is_lazy(value, dtype):
            return None
        if not address_of(value):
            return None
        if nbytes <= SMALL:
            if not value.is_contiguous():
                value = value.detach().contiguous()
            data = read(value.data_ptr(), nbytes)
            compact = CompactTensor(torch.Tensor, KNOWN[dtype][0], tuple(value.shape), data)
            return compact, compact
        if not value.is_contiguous() or torch.is_inference_mode_enabled():
            return None
        value = value.detach().clone()  # detached, so no graph records the clone
        digest = xxh3_128_digest(memory_at(value.data_ptr(), nbytes))
        # the same key as the general way to tell changes makes
        return (torch.Tensor, dtype_name(dtype), tuple(value.shape), digest), value
    except (RuntimeError, KeyError):
        return None  # no memory of its own, or an unknown dtype


KEYED[torch.Tensor] = keyed_copy
COMPACT.add(CompactTensor)
