"""Private interfaces of torch that only tracking uses, each in one function with a fallback.

See `tensortap.values.torch.private`, which has the others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

log = logging.getLogger("tensortap")


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this one is a view of.

    Buys: the gradient of an output that a later operation changes in place. Otherwise that
    gradient is not seen.
    """
    base: torch.Tensor | None = getattr(tensor, "_base", None)
    return base


# code between a module and who calls it, if it is compiled or in a checkpoint
_WRAPPERS = ("torch._dynamo.", "torch._compile", "torch.autograd.", "torch.utils.checkpoint")


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
                above.f_code in codes or above.f_globals.get("__name__", "").startswith(_WRAPPERS)
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


# -- the compiler ---------------------------------------------------------------------------------


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


def splits_for_ddp() -> bool:
    """Return whether the graph that is being compiled will be split for DDP.

    Buys: if the program turns `optimize_ddp` on while a model is tracked, its modules are left out
    of graphs. Otherwise the next step raises.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo.symbolic_convert import InstructionTranslator

        compiler = InstructionTranslator.current_tx().output.compiler_fn
        return "DDPOptimizer" in getattr(compiler, "__qualname__", "")
    return False


def is_compiled(tensor: torch.Tensor) -> bool:
    """Return whether a compiled graph has returned this tensor.

    Buys: the user is told of gradients that such graphs keep to themselves. Otherwise not.
    """
    return compiler_is_loaded() and type(tensor.grad_fn).__name__ == "CompiledFunctionBackward"


@functools.cache
def accept_missing_gradients() -> None:
    """Make compiled autograd accept hooks of tensors whose gradient is None.

    Buys: an output that the loss does not use, with a hook, does not raise in `backward`. Otherwise
    it does, as any hook of the program does.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo.compiled_autograd import AutogradCompilerInstance

        usual = AutogradCompilerInstance.is_placeholder

        def is_placeholder(node: Any) -> bool:
            return node is None or bool(usual(node))

        AutogradCompilerInstance.is_placeholder = staticmethod(is_placeholder)


def may_break() -> bool:
    """Return whether the graph that is being compiled may end here, and another one begin.

    Buys: steps of optimizers are seen where they are compiled, unless that would raise. Otherwise
    they are not seen.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo.symbolic_convert import InstructionTranslator

        compiler = InstructionTranslator.current_tx()
        return not (compiler.one_graph or compiler.error_on_graph_break)
    return False


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
    accept_missing_gradients()
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


_known_graphs = 0


def may_have_graphs(model: torch.nn.Module) -> bool:
    """Return whether an existing graph may contain modules of a model: it guards their classes.

    Buys: graphs of other functions are not compiled anew because a model is tracked that has not
    been called. Otherwise they are.
    """
    classes = set(map(type, model.modules()))
    try:
        from torch._dynamo.convert_frame import input_codes
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list as graphs_of

        codes = [code for each in input_codes.seen if (code := each()) is not None]
        pending = [graph.guard_manager.root for code in codes for graph in graphs_of(code)]
        while pending:
            guards = pending.pop()
            if guards.get_type_of_guarded_value() in classes:
                return True
            pending += guards.get_child_managers()
            if hasattr(guards, "get_key_value_managers"):  # of a dict
                pairs = guards.get_key_value_managers().values()
                pending += [each for pair in pairs for each in pair if each is not None]
    except (ImportError, AttributeError, TypeError):
        return True
    return False


def forget_graphs(what: str, model: torch.nn.Module, begins: bool) -> None:
    """Make torch compile everything anew: existing graphs know nothing of new or removed hooks."""
    global _known_graphs
    guard_hooks(1 if begins else -1)
    if not compiler_is_loaded() or not may_have_graphs(model):
        return
    with warnings.catch_warnings():  # of modules that torch imports to reset a backend
        warnings.simplefilter("ignore")
        torch.compiler.reset()
    graphs = compiled_graphs()
    if graphs > _known_graphs:
        reason = f"{what}, and once more when that ends" if begins else f"{what} no longer"
        reason = f"{reason}; this concerns all graphs of the program"
        level = logging.WARNING if begins else logging.INFO  # of an end, the beginning has told
        log.log(level, "tensortap: torch.compile compiles existing graphs anew: %s", reason)
    _known_graphs = graphs


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
