"""Private interfaces of torch's compiler, each in one function with a fallback; see `private`."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch


def skip_frame(code: CodeType, skip: bool = True, calls: bool = True) -> None:
    """Run this code, and all that it `calls`, without compiling it; graphs still look into it.

    Buys: where a graph breaks at a hook, the hook is not compiled once for every module. Otherwise
    compiling takes longer.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame
        from torch._dynamo.types import FrameAction, FrameExecStrategy

        actions = [FrameAction.SKIP if on else FrameAction.DEFAULT for on in (skip, skip and calls)]
        eval_frame.set_code_exec_strategy(code, FrameExecStrategy(*actions))


def must_not_break() -> bool:
    """Return whether the graph that is being compiled must not break; call it while compiling.

    Buys: values that cannot be traced in a graph with ``fullgraph=True`` are left out instead of
    raising in the user's program. Otherwise they are left out of every graph.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        compiler = InstructionTranslator.current_tx()
    except (ImportError, AttributeError):
        return True
    return bool(
        getattr(compiler, "one_graph", False) or getattr(compiler, "error_on_graph_break", False)
    )


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


_guarding = 0  # how many want graphs to depend on hooks
_replaced: dict[str, Any] = {}  # the user's settings of the compiler, while others apply


def guard_hooks(change: int = 0) -> None:
    """Make graphs depend on which modules have hooks, as long as anyone wants that.

    Buys: of two modules of one class, the one without hooks does not hide the other, whose code it
    shares. Otherwise it does, if it is compiled first. And torch does not split graphs for DDP: it
    cannot split those with operators that have side effects, and would raise.
    """
    global _guarding
    _guarding += change
    if not compiler_is_loaded():
        when_compiler_loads(guard_hooks)
        return
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo import config

        if _guarding and not _replaced:
            _replaced["skip_nnmodule_hook_guards"] = config.skip_nnmodule_hook_guards
            config.skip_nnmodule_hook_guards = False
            if config.optimize_ddp in (True, "ddp_optimizer"):
                _replaced["optimize_ddp"] = config.optimize_ddp
                config.optimize_ddp = False
        while not _guarding and _replaced:
            setattr(config, *_replaced.popitem())


def splits_for_ddp() -> bool:
    """Return whether the graph that is being compiled will be split for DDP.

    Buys: if the program turns `optimize_ddp` on while a model is tracked, its graphs break at the
    modules. Otherwise the next step raises.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo.symbolic_convert import InstructionTranslator

        compiler = InstructionTranslator.current_tx().output.compiler_fn
        return "DDPOptimizer" in getattr(compiler, "__qualname__", "")
    return False


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
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    ]


def compiler_is_loaded() -> bool:
    """Return whether the program has imported torch's compiler."""
    return "torch._dynamo" in sys.modules


class _CompilerFinder(importlib.abc.MetaPathFinder):
    """Finds torch's compiler as the other finders do, and calls functions once it is loaded."""

    def __init__(self) -> None:
        self.calls: dict[Callable[[], None], None] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute, calls = loader.exec_module, list(self.calls)

            def exec_module(module: Any) -> None:
                execute(module)
                for call in calls:
                    call()

            loader.exec_module = exec_module
        self.calls.clear()
        return spec


_finder = _CompilerFinder()


def when_compiler_loads(call: Callable[[], None]) -> None:
    """Call a function when the program imports torch's compiler, which it has not done yet."""
    _finder.calls[call] = None
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
