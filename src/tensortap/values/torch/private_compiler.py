"""Private interfaces of torch's compiler, each in one function with a fallback; see `private`."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import torch


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


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled; call it once the compiler is loaded.

    Buys: the user is told that graphs are compiled anew, if there are any, and no mode is active
    around compiled parts of a model. Otherwise nobody is told, and torch compiles them once more.
    """
    try:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])
    except (ImportError, AttributeError, KeyError, TypeError):
        return 0


def compiled_modules(model: torch.nn.Module | None) -> list[torch.nn.Module]:
    """Return the modules of a model that are compiled, perhaps itself.

    Buys: the user is told that they run eagerly while operations are recorded, and that nothing
    is traced in them, also before their first call. Otherwise from the first graph on.
    """
    return [
        module
        for module in (() if model is None else model.modules())
        if "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None
    ]


def compiler_is_loaded() -> bool:
    """Return whether the program has imported torch's compiler."""
    return "torch._dynamo" in sys.modules
