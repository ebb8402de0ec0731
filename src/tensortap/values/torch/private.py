"""Private interfaces of torch, each in one function with a fallback.

A release of torch that lacks one of them costs what the function says, and nothing else.

Those of its compiler are in `private_compiler`, and those that must not import torch in `hidden`.
"""

from __future__ import annotations

import contextlib
import datetime
import operator
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch

Context = contextlib.AbstractContextManager[Any]

_version = operator.attrgetter("_version")
_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_running_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_node: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def without_overrides() -> Context:
    """Turn off subclasses and modes of ``__torch_function__``.

    Buys: no mode and no subclass of the user sees that tensortap reads an attribute. Otherwise
    they do.
    """
    disable = getattr(torch._C, "DisableTorchFunction", contextlib.nullcontext)
    context: Context = disable()
    return context


def has_dispatch_modes() -> bool:
    """Return whether a ``TorchDispatchMode`` may be active.

    Buys: tensors are copied the short way where there is none. Otherwise the long way is taken.
    """
    return _dispatch_modes() > 0


def without_dispatch_modes() -> Context:
    """Turn off every ``TorchDispatchMode``.

    Buys: counters and fake modes of the user do not see the copy of a tensor. Otherwise they do.
    """
    try:
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        return contextlib.nullcontext()
    context: Context = _disable_current_modes()
    return context


def backward_pass() -> int:
    """Return a number for the backward pass that is running; -1 outside of one.

    Buys: what a checkpoint recomputes is told from a second forward pass, and the gradients of two
    backward passes are told apart. Otherwise recomputed outputs look like further calls.
    """
    return _graph_task()


def after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that is running, after all others.

    Buys: gradients as a backward pass leaves them, averaged by DDP, before anything clips them.
    Otherwise they are seen at the step of the optimizer only.
    """
    engine = torch.autograd.Variable._execution_engine
    # those that wait already, such as DDP's, come first
    engine.queue_callback(lambda: engine.queue_callback(call))


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


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if nobody counts.

    Buys: a gradient that was zeroed, or observed before, is told from a new one. Otherwise the
    same tensor counts as unchanged.
    """
    try:
        return int(tensor._version)
    except (AttributeError, RuntimeError):  # tensors of inference mode do not count
        return 0


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return `version_of` of many tensors, faster."""
    tensors = list(tensors)
    try:
        return list(map(_version, tensors))
    except (AttributeError, RuntimeError):
        return list(map(version_of, tensors))


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this one is a view of.

    Buys: the gradient of an output that a later operation changes in place. Otherwise that
    gradient is not seen.
    """
    base: torch.Tensor | None = getattr(tensor, "_base", None)
    return base


_WRAPPERS = "torch._dynamo.eval_frame"  # what calls a compiled module


class RunningCall(NamedTuple):
    """A call of a module that is under way, and the function and line that made it."""

    module: torch.nn.Module
    inputs: Any
    caller: str


def module_calls() -> list[RunningCall]:
    """Return the calls of modules that are under way in this thread, the innermost first.

    Buys: the origin of a NaN between two modules. Otherwise the module after it is named.
    """
    module = torch.nn.Module
    known = [getattr(module, name, None) for name in ("_call_impl", "_wrapped_call_impl")]
    codes = [getattr(function, "__code__", None) for function in known]
    calls = []
    frame = sys._getframe(1)
    while (above := frame.f_back) is not None:
        if frame.f_code is codes[0]:
            local = frame.f_locals
            while above.f_back is not None and (
                above.f_code in codes or above.f_globals.get("__name__") == _WRAPPERS
            ):
                above = above.f_back
            inputs = local["args"], local["kwargs"]
            code, line = above.f_code, above.f_lineno
            caller = f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{line})"
            calls.append(RunningCall(local["self"], inputs, caller))
        frame = above
    return calls


def running_collective(tensor: Any) -> Any:
    """Return the result of a collective that nobody has waited for; None for other tensors.

    Its attribute `completed` turns true when the program uses it. Buys: hooks do not wait for
    communication that the program overlaps with work. Otherwise they do.
    """
    if type(tensor) is torch.Tensor:
        return None
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor if getattr(tensor, "completed", True) is False else None


def result_of(collective: Any) -> torch.Tensor:
    """Return the tensor that a collective writes, without waiting for it.

    Buys: a result that was changed in place is not recorded. Otherwise it is.
    """
    result: torch.Tensor = getattr(collective, "elem", collective)
    return result


def running_node() -> Any:
    """Return the node of the graph that a backward pass is running in this thread, or None.

    Buys: operations of a backward pass are told from others, and know which forward they belong to.
    Otherwise they count as forward operations at the line that called ``backward()``.
    """
    return _running_node()


def number_of(node: Any) -> int:
    """Return the number of a node of the graph; nodes are numbered in the order of the forward.

    Buys: the line of the forward for each backward operation. Otherwise it has no line.
    """
    number: int = getattr(node, "_sequence_nr", lambda: -1)()
    return number


def next_node() -> int:
    """Return the number that the next node of the graph will get.

    Buys: with `number_of`, which operation of the forward made a node. Otherwise nobody knows.
    """
    return _next_node()


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator, with the names of its arguments; None if it has none.

    Buys: names of arguments, and which of them an operator overwrites. Otherwise the results alone
    are observed.
    """
    return getattr(operator, "_schema", None)


def is_inner_stage() -> bool:
    """Return whether a pipeline stage that is not the last one calls the current module.

    Buys: the output of an inner stage is not taken for the output of the model. Otherwise it is.
    """
    has_stages = "torch.distributed.pipelining.stage" in sys.modules
    frame: FrameType | None = sys._getframe(1) if has_stages else None
    while frame is not None:
        if frame.f_code.co_name == "forward_maybe_with_nosync":
            return not getattr(frame.f_locals.get("self"), "is_last", True)
        frame = frame.f_back
    return False


def root_mesh(mesh: Any) -> Any:
    """Return the mesh of which another one was sliced.

    Buys: records tell where a rank is along all dimensions, also those over which a tensor is not
    split. Otherwise they tell it of those over which it is.
    """
    root = getattr(mesh, "_get_root_mesh", None)
    return mesh if root is None else root()
