"""Private interfaces of torch, each in one function with a fallback.

A release of torch that lacks one of them costs what the function says, and nothing else.

Those that must not import torch are in `hidden`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import torch

Context = contextlib.AbstractContextManager[Any]

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
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


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if nobody counts.

    Buys: a gradient that was zeroed, or observed before, is told from a new one. Otherwise the
    same tensor counts as unchanged.
    """
    try:
        return int(tensor._version)
    except (AttributeError, RuntimeError):  # tensors of inference mode do not count
        return 0


# -- of the compiler ---------------------------------------------------------------------


def traced_caller() -> Any:
    """Return the frame of the user's function that is being compiled; None if it is not known.

    Buys: a value that compiled code catches without a name is named after the expression.
    Otherwise that value is not captured.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        compiler: Any = frame.f_locals.get("self")  # which interprets the code of one function
        module = getattr(compiler, "f_globals", {}).get("__name__", "tensortap.")
        if not module.startswith(("torch._dynamo", "tensortap.")):
            with contextlib.suppress(AttributeError):
                return SimpleNamespace(
                    f_code=compiler.f_code, f_globals=compiler.f_globals, f_back=None,
                    f_lineno=compiler.lineno, f_lasti=compiler.current_instruction.offset,
                )  # fmt: skip
        frame = frame.f_back
    return None


def keep_in_graphs(library: torch.library.Library, operator: str) -> bool:
    """Say that an operator has side effects, so that no compiler removes it; return success.

    Buys: everything that is seen inside compiled graphs. Otherwise nothing is.
    """
    try:
        from torch._higher_order_ops import register_hook  # noqa: F401 - hooks on tensors in graphs
        from torch._library.effects import EffectType

        torch.library._register_effectful_op(operator, EffectType.ORDERED, lib=library)
    except (ImportError, AttributeError):
        return False
    return True
