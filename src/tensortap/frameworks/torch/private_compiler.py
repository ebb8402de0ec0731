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


def traced_caller(*skipped: str) -> Any:
    """Return the frame of the user's function that is being compiled; None if it is not known.

    Frames of the modules `skipped` are not taken. Buys: a value that compiled code catches without
    a name is named after the expression, and a NaN in a graph has a line. Otherwise that value is
    not captured, and the NaN has no line.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        compiler: Any = frame.f_locals.get("self")  # which interprets the code of one function
        module = getattr(compiler, "f_globals", {}).get("__name__", "tensortap.")
        if not module.startswith(("torch._dynamo", "tensortap.", *skipped)):
            with contextlib.suppress(AttributeError):
                return SimpleNamespace(
                    f_code=compiler.f_code, f_globals=compiler.f_globals, f_back=None,
                    f_lineno=compiler.lineno, f_lasti=compiler.current_instruction.offset,
                )  # fmt: skip
        frame = frame.f_back
    return None


def traced_graph() -> Any:
    """Return an object that stands for the graph that is being compiled; None if none is known.

    Buys: attention in a graph is known to belong to a module. Otherwise `tracker.unseen` names it.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return InstructionTranslator.current_tx().output
    return None


def traced_use() -> tuple[Any, torch.Tensor] | None:
    """Return the variables `hook` and `tensor` of the function that is being compiled.

    Instead of the tensor, return its example value, one object per tensor of the graph. Buys: the
    origin of a gradient that becomes non-finite in a graph. Otherwise a module is not told from
    the code before it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        known = getattr(frame.f_locals.get("self"), "symbolic_locals", {})
        if "hook" in known and "tensor" in known:
            # another release of torch, or a variable without an example value
            with contextlib.suppress(AttributeError, KeyError, NotImplementedError):
                tensor = known["tensor"].as_proxy().node.meta["example_value"]
                return known["hook"].value, tensor
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


def captures_cuda_graphs() -> bool:
    """Return whether the graph that is being compiled becomes a CUDA graph; for hooks.

    Buys: statistics of modules inside CUDA graphs are reduced there. Otherwise Inductor captures
    the parts between our operators.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        backend = InstructionTranslator.current_tx().output.compiler_fn
    except (ImportError, AttributeError):
        return False
    config: dict[str, Any] = getattr(backend, "get_compiler_config", dict)()
    return bool(config.get("triton.cudagraphs", False))


def keep_address(tensor: torch.Tensor) -> None:
    """Say that a tensor stays where it is, so that CUDA graphs use it and not a copy.

    Buys: what `torch._dynamo.mark_static_address` does, without importing the compiler. Otherwise
    nothing is seen inside CUDA graphs.
    """
    tensor._dynamo_static_input_type = "unguarded"


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled; call it once the compiler is loaded.

    Buys: the user is told that graphs are compiled anew, if there are any. Otherwise nobody is.
    """
    try:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])
    except (ImportError, AttributeError, KeyError, TypeError):
        return 0


def is_compiled(model: torch.nn.Module | None) -> bool:
    """Return whether a model, or a module in it, is compiled.

    Buys: the user is told that it runs eagerly while operations are recorded, also before its first
    call. Otherwise from the first graph on.
    """
    return model is not None and any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


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
