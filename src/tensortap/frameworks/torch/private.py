"""Private interfaces of torch: every one but `hidden`, each in one function with a fallback.

A release of torch that lacks one of them costs what the function says, and nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.abc
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from tensortap.frameworks.origin import caller_name

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


def script_as(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Make TorchScript take a function, which must live forever, for the one that it replaces.

    Buys: programs script functions while the original is replaced. Otherwise that raises.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch.jit import _builtins

        if (operator := _builtins._find_builtin(original)) is not None:
            _builtins._register_builtin(function, operator)


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


def traced_use() -> tuple[Any, torch.Tensor] | None:
    """Return the variables `hook` and `tensor` of the function that is being compiled.

    Of the tensor, it is what stands for it: the same object as long as it is the same tensor. Buys:
    the origin of a gradient that becomes non-finite in a graph. Otherwise a module is not told from
    the code before it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        known = getattr(frame.f_locals.get("self"), "symbolic_locals", {})
        if "hook" in known and "tensor" in known:
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


def is_scaled_by(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler is making a step of an optimizer.

    Buys: a scaler is known to belong to an optimizer. Otherwise no rule speaks of scalers.
    """
    return id(optimizer) in getattr(scaler, "_per_optimizer_states", ())


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
            calls.append(RunningCall(local["self"], inputs, caller_name(above)))
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


def simulated_parts(tensor: Any) -> dict[int, torch.Tensor] | None:
    """Return the tensors of the ranks that ``LocalTensorMode`` simulates; None for other tensors.

    Buys: records of each of them. Otherwise such tensors are not recorded, and counted as errors.
    """
    simulated = type(tensor).__name__ == "LocalTensor"
    return getattr(tensor, "_local_tensors", None) if simulated else None


def simulates_ranks() -> bool:
    """Return whether ``LocalTensorMode`` simulates the ranks of this job."""
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.local_tensor_mode() is not None


def root_mesh(mesh: Any) -> Any:
    """Return the mesh of which another one was sliced.

    Buys: records tell where a rank is along all dimensions, also those over which a tensor is not
    split. Otherwise they tell it of those over which it is.
    """
    root = getattr(mesh, "_get_root_mesh", None)
    return mesh if root is None else root()


def before_compiled_call(module: Any, look: Callable[..., None]) -> Callable[[], None]:
    """Call a function with the inputs of a module that ``module.compile()`` has compiled.

    Buys: inputs of such models are compared across ranks; no hook runs outside of their graphs.
    Returns a function that ends this.
    """
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        return lambda: None

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            look(module, args, kwargs)
        return compiled(*args, **kwargs)

    def undo() -> None:
        if module._compiled_call_impl is call:
            module._compiled_call_impl = compiled

    module._compiled_call_impl = call
    return undo
