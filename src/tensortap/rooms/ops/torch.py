"""Operations of a torch program as they run: forward, backward and optimizer.

A `TorchDispatchMode` sees each of them below autograd. It reads tensors in place, runs the
operation unchanged, and hands both sides to the observer. Collectives run in the background and
are not read; neither is memory that nothing has been written to.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from xxhash import xxh3_128

from tensortap.core.errors import CaptureError
from tensortap.core.record import Shard, Summary
from tensortap.rooms.ops.operations import (
    OPTIMIZER,
    Operation,
    OperationInput,
    OperationOutput,
)
from tensortap.rooms.ops.torch_places import OperationPlace, OperationPlaces
from tensortap.rooms.track.packed import summary_of
from tensortap.rooms.track.torch import internals
from tensortap.stats.digest import tensor_head
from tensortap.values.snapshot import describe, digest_of
from tensortap.values.torch.hidden import hide_from_compiler
from tensortap.values.torch.shards import local_shard
from tensortap.values.torch.tensors import KNOWN, is_lazy
from tensortap.values.view import array_of, memory_at

if TYPE_CHECKING:
    from tensortap.rooms.ops.ops import OperationRecorder

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_EAGER = "compiled code runs eagerly while operations are recorded: its last bits may differ"
# what computes nothing, runs in the background, or returns memory that is not written yet
_SKIPPED_LIBRARIES = ("c10d", "_c10d_functional", "fsdp", "prim", "prims", "profiler")
_SKIPPED = (
    "alias", "detach", "detach_", "lift", "lift_fresh", "record_stream", "resize_", "resize_as_",
    "set_",
)  # fmt: skip
# views that show all elements of another tensor once, if they have as many
_SAME_ELEMENTS = frozenset(
    ("view", "t", "transpose", "permute", "unsqueeze", "squeeze", "unsafe_view", "reshape_alias")
)
_UNWRITTEN = ("empty", "new_empty", "_empty")


class OperatorKind(NamedTuple):
    """Facts about an operator that hold for all its calls.

    `written` are the arguments that it overwrites; those in `changed` it reads as well.
    """

    name: str
    type: str
    skip: bool
    arguments: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    is_view: bool = False


@functools.cache
def _kind_of(operator: Any) -> OperatorKind:
    schema = getattr(operator, "_schema", None)  # private
    if schema is None:
        return OperatorKind(str(operator), str(operator), False)
    library, _, name = schema.name.rpartition("::")
    skip = library in _SKIPPED_LIBRARIES or name in _SKIPPED or name.startswith(_UNWRITTEN)
    if name == "wait_tensor":
        skip = False
    writes = [arg for arg in schema.arguments if arg.alias_info and arg.alias_info.is_write]
    return OperatorKind(
        name.lstrip("_"), str(operator), skip, tuple(arg.name for arg in schema.arguments),
        frozenset(arg.name for arg in writes),
        frozenset(arg.name for arg in writes if not arg.kwarg_only),
        bool(getattr(operator, "is_view", False)) or name == "_unsafe_view",
    )  # fmt: skip


def operations(model: Any, observer: OperationRecorder) -> OperationHooks | None:
    """Return hooks that report every operation of a model, or of any program without one.

    None if it is not a torch model.
    """
    is_program = model is None or isinstance(model, torch.nn.Module)
    return OperationHooks(model, observer) if is_program else None


class OperationHooks:
    """Report every operation of the program to an observer, between `attach` and `detach`."""

    def __init__(self, root: torch.nn.Module | None, observer: OperationRecorder) -> None:
        self._observer = observer
        self._root = root
        self._open = contextlib.ExitStack()

    def attach(self) -> None:
        """Record from here on; compiled code runs eagerly until `detach`."""
        places = OperationPlaces(self._root)
        with contextlib.ExitStack() as stack:
            if internals.compiler_is_loaded():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                if internals.compiled_graphs() or internals.compiled_modules(self._root):
                    self._observer.remarks["torch.compile"] = _EAGER
            places.attach()
            stack.callback(places.detach)
            stack.enter_context(OperationMode(places, self._observer))
            self._open = stack.pop_all()

    def detach(self) -> None:
        self._open.close()


class OperationMode(TorchDispatchMode):  # type: ignore[misc]
    """Run operations unchanged and report what they read and wrote."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import the compiler and cost a call per operation

    def __init__(self, places: OperationPlaces, observer: OperationRecorder) -> None:
        super().__init__()
        self._places = places
        self._observer = observer
        self._known = KnownTensors()
        self._indices: dict[tuple[str, str, int], int] = {}
        self._step = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        seen = None
        try:
            seen = self._before(func, args, kwargs)
        except Exception as error:
            self._observer.fault(str(func), error)
        result = func(*args, **kwargs)
        if seen is not None:
            try:
                self._after(seen, result)
            except Exception as error:
                self._observer.fault(str(func), error)
        return result

    def _before(self, func: Any, args: Any, kwargs: Any) -> RunningOperation | None:
        kind = _kind_of(func)
        place = self._places.find(sys._getframe(2), bool(kind.changed))
        if place is None or kind.skip or not self._observer.capturing:
            return None
        names = (*kind.arguments, *("argument" for _ in args[len(kind.arguments) :]))
        given = [*zip(names, args, strict=False), *kwargs.items()]
        inputs, scalars, written = [], {}, []
        for name, value in given:
            if isinstance(value, torch.Tensor):
                tensors = [(name, value)]
            elif isinstance(value, (list, tuple)) and any(map(_is_tensor, value)):
                tensors = [(f"{name}[{i}]", x) for i, x in enumerate(value) if _is_tensor(x)]
            else:
                scalars[name] = value
                continue
            if name in kind.written:
                written += [tensor for _, tensor in tensors]
            if name not in kind.written or name in kind.changed:
                # of a list, copies would need as much memory as the model
                changed = name in kind.changed
                copy = changed and len(tensors) == 1
                inputs += [self._known.input(label, x, copy, changed) for label, x in tensors]
        parameters: list[str] = []
        if place.phase == OPTIMIZER:
            parameters = self._places.updated(args)
            place = place._replace(module=_module_of(parameters))
        viewed = args[0] if kind.name in _SAME_ELEMENTS and args else None
        return RunningOperation(kind, place, inputs, scalars, written, parameters, viewed)

    def _after(self, seen: RunningOperation, result: Any) -> None:
        kind, place, _, _, written, parameters, viewed = seen
        found = written or list(_tensors_in(result))
        if not found:
            return
        if written:
            self._known.clear()
        several = len(found) > 1
        named = parameters if len(parameters) == len(found) else parameters[:1] * len(found)
        outputs = [
            self._known.output(f"[{i}]" if several else "", x, named[i] if named else "", viewed)
            for i, x in enumerate(found)
        ]
        step = self._observer.step_number
        if step != self._step:
            self._step = step
            self._indices.clear()
            self._places.end_step()
        at = place.phase, place.module or place.line.function, place.call
        index = self._indices[at] = self._indices.get(at, -1) + 1
        self._observer.operation(Operation(
            kind.name, kind.type, place.phase, place.module, place.call, index, place.line,
            seen.inputs, outputs, seen.scalars, place.node,
            kind.is_view,
        ))  # fmt: skip


hide_from_compiler(OperationMode.__torch_dispatch__)


class RunningOperation(NamedTuple):
    """An operation that has not run yet."""

    kind: OperatorKind
    place: OperationPlace
    inputs: list[OperationInput]
    scalars: dict[str, Any]
    written: list[torch.Tensor]
    parameters: list[str]
    viewed: torch.Tensor | None  # what a view shows


def _module_of(parameters: list[str]) -> str:
    """Return the module of a parameter; ``optimizer`` for several of them."""
    return parameters[0].rpartition(".")[0] if len(parameters) == 1 else "optimizer"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from _tensors_in(each)


# -- tensors --------------------------------------------------------------------------------


class KnownTensors:
    """Describe tensors, and read what one operation writes and the next one reads only once."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[weakref.ref[torch.Tensor], bytes | None]] = {}
        self._stats: dict[int, tuple[weakref.ref[torch.Tensor], Summary]] = {}

    def clear(self) -> None:
        """Forget everything: memory was written that other tensors may share."""
        self._digests.clear()
        self._stats.clear()

    def input(self, name: str, tensor: torch.Tensor, copy: bool, changed: bool) -> OperationInput:
        """Describe a tensor that is read, before it is; `copy` it if it will be overwritten."""
        value, _ = _local(tensor)
        kept = value.clone() if copy and _is_float(value) else value
        array = _nothing if changed and kept is value else functools.partial(_array, kept)
        reference, digest = self._digests.get(id(value), (None, None))
        if reference is None or reference() is not value:
            digest = self._note(value)
        _, dtype, shape = describe(value)
        return OperationInput(name, dtype, shape, digest, _memory(value), array)

    def output(
        self, path: str, tensor: torch.Tensor, parameter: str, viewed: torch.Tensor | None = None
    ) -> OperationOutput:
        """Describe a tensor that was written, or that shows the elements of `viewed`."""
        value, shard = _local(tensor)
        stats = None if viewed is None else self._stats_of_view(value, viewed)
        if stats is None:
            with contextlib.suppress(CaptureError, TypeError):
                stats, pending = summary_of(value)
                stats = stats if pending is None else pending.resolve()
        if stats is not None:
            self._stats[id(value)] = weakref.ref(value), stats
        _, dtype, shape = describe(value)
        array = functools.partial(_array, value)
        digest, memory = self._note(value), _memory(value)
        return OperationOutput(path, dtype, shape, digest, stats, memory, array, shard, parameter)

    def _stats_of_view(self, value: torch.Tensor, viewed: torch.Tensor) -> Summary | None:
        """Return the statistics of a tensor if a view has the same elements and they are known."""
        reference, stats = self._stats.get(id(viewed), (None, None))
        same = reference is not None and reference() is viewed
        if not same or value.numel() != viewed.numel() or value.dtype != viewed.dtype:
            return None
        return stats

    def _note(self, tensor: torch.Tensor) -> bytes | None:
        if len(self._digests) > 4096:  # tensors that are remembered
            self.clear()
        digest = _digest(tensor)
        self._digests[id(tensor)] = weakref.ref(tensor), digest
        return digest


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, Shard | None]:
    """Return this rank's part of a distributed tensor."""
    return local_shard(tensor) if hasattr(tensor, "device_mesh") else (tensor, None)


def _is_float(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _nothing() -> None:
    return None


def _array(tensor: torch.Tensor) -> Any:
    # of a copy: torch never resizes memory again that a NumPy array has seen, as FSDP has to
    return array_of(tensor.detach().clone())


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 for tensors without one, such as sparse ones."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def _digest(tensor: torch.Tensor) -> bytes | None:
    """Return the digest of a tensor; of most of them without a copy. None if it has no bytes."""
    try:
        dtype = tensor.dtype
        plain = type(tensor) in _PLAIN and tensor.is_cpu and not tensor.is_nested
        if plain and not is_lazy(tensor, dtype):
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            hasher = xxh3_128(tensor_head(KNOWN[dtype][0], tuple(tensor.shape)))
            if nbytes := tensor.nbytes:
                hasher.update(memory_at(tensor.data_ptr(), nbytes))
            return hasher.digest()
        return digest_of(tensor)
    except (CaptureError, KeyError, RuntimeError):
        return None
