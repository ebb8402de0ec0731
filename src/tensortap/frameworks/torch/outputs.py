"""Hooks on the modules of a torch model: their outputs, and the gradients of the outputs.

In a model that torch.compile compiles, a hook has to leave the graph to observe anything. Where a
graph may break, the hook breaks it; with ``fullgraph=True`` that would raise in the user's
program, so there it compiles to nothing and reports that its module is not seen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tensortap.frameworks.observing import Explain, HookObserver, tensors_in
from tensortap.frameworks.torch import private
from tensortap.frameworks.torch.collectives import Collectives
from tensortap.frameworks.torch.hidden import hide_from_compiler
from tensortap.frameworks.torch.layouts import Layouts
from tensortap.frameworks.torch.names import Names, type_name, unwrapped
from tensortap.frameworks.torch.origins import Origins
from tensortap.frameworks.torch.shards import observed
from tensortap.record import Kind, Shard, Summary

FULLGRAPH = "it is part of a graph compiled with fullgraph=True, which a hook cannot leave"

_compiling: Callable[[], bool] = torch.compiler.is_compiling


def outside_graphs(
    hook: Callable[..., None], name: str, on_unseen: Callable[[str], None]
) -> Callable[..., None]:
    """Return the hook so that it runs outside of compiled graphs.

    `on_unseen` is called with the name where it cannot run.
    """

    def leave(*args: Any) -> None:
        hook(*args)

    def must_stay() -> bool:
        if private.must_not_break():
            on_unseen(name)
            return True
        private.skip_frame(on_call.__code__)
        return False

    hide_from_compiler(leave)
    private.constant_when_compiled(must_stay)

    def on_call(*args: Any) -> None:
        if _compiling() and must_stay():
            return
        leave(*args)

    if private.compiler_is_loaded():
        private.skip_frame(on_call.__code__)
    return on_call


def forget_graphs() -> None:
    """Make torch compile everything anew: existing graphs know nothing of new or removed hooks."""
    if private.compiler_is_loaded():
        torch.compiler.reset()


class ModuleCall(NamedTuple):
    """One call of a module: where it is counted, and what to capture of it."""

    step: int
    call: int
    activation: bool
    gradient: bool


class OutputHooks:
    """Hooks on every module of a model; `title` is a prefix of their names."""

    def __init__(self, root: torch.nn.Module, observer: HookObserver, title: str = "") -> None:
        self.root = root
        self.observer = observer
        self.title = title
        self._handles: list[Any] = []
        self._leaf_handles: dict[str, Any] = {}  # hooks on tensors that outlive their step
        self._calls: dict[str, int] = {}
        self._recomputable: dict[str, list[int]] = {}  # calls that a checkpoint may repeat
        self._origins = Origins(root) if observer.explains else None
        self._layouts = Layouts(root)
        self._collectives = Collectives(observer)
        self._last: tuple[Callable[[], Any], int, Summary | None] = (lambda: None, 0, None)

    def attach(self) -> None:
        if not {Kind.ACTIVATION, Kind.GRADIENT} & set(self.observer.kinds):
            return
        forget_graphs()
        modules = Names(self.root).modules(as_one=private.is_fullgraph)
        for i, (name, module) in enumerate(modules):
            if self.title:  # the model itself comes first
                name = f"{self.title}.{name}" if i else self.title
            self._attach_module(module, name)

    def _attach_module(self, module: torch.nn.Module, name: str) -> None:
        activation = self.observer.wants(Kind.ACTIVATION, name)
        gradient = self.observer.wants(Kind.GRADIENT, name)
        if activation or gradient:
            cls = type_name(unwrapped(module))
            wanted = ModuleCall(0, 0, activation, gradient)
            hook = functools.partial(self._on_output, name, cls, wanted, module)
            outside = outside_graphs(hook, name, self._report_unseen)
            own = module.parameters(recurse=False) if self._layouts.mesh else ()
            if any(hasattr(parameter, "device_mesh") for parameter in own):
                note = functools.partial(self._on_computed, name)
                before = outside_graphs(note, name, self._report_unseen)
                self._handles.append(module.register_forward_hook(before, prepend=True))
            self._handles.append(module.register_forward_hook(outside, with_kwargs=True))

    def _on_computed(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self.observer.capturing:
            self._layouts.computed(name, output)

    def _report_unseen(self, name: str) -> None:
        self.observer.unseen[name] = FULLGRAPH

    def detach(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._remove_leaf_handles()
        forget_graphs()

    def _remove_leaf_handles(self) -> None:
        while self._leaf_handles:
            self._leaf_handles.popitem()[1].remove()

    def end_step(self) -> None:
        """Count the calls of the next step from zero."""
        self._collectives.poll(most=0)
        self._calls.clear()
        self._layouts.end_step()
        self._recomputable.clear()
        self._remove_leaf_handles()
        if self._origins is not None:
            self._origins.end_step()

    def _on_output(
        self,
        name: str,
        cls: str,
        wanted: ModuleCall,
        original: torch.nn.Module,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        observer = self.observer
        if not observer.capturing:
            return
        try:
            self._collectives.poll()
            training = self.root.training
            if observer.only_training and not training:
                return
            again = private.backward_pass() != -1  # a checkpoint recomputes in the backward pass
            counted = self._count(wanted, name, again, module is not original, output)
            if counted is None:
                return
            step, call, activation, gradient = counted
            tags = {} if training else {"mode": "eval"}
            origins, explain = self._origins, None
            if origins is not None and not again:
                inputs = args, kwargs
                origins.called(name, inputs)
                explain = functools.partial(origins.of_output, name, cls, step, inputs)
            for path, tensor in tensors_in(output, torch.Tensor):
                own_tags = {**tags, "module": name} if path else tags
                shard, placed = self._layouts.of(name, tensor, (args, kwargs))
                own_tags = {**own_tags, **placed}
                if activation:
                    all_tags = {**own_tags, "recompute": "1"} if again else own_tags
                    seen = functools.partial(
                        observed, name + path, Kind.ACTIVATION, tensor, call, cls, all_tags, shard
                    )
                    if type(tensor) is torch.Tensor:
                        observer.observe(*seen(), step, None, explain)
                    else:
                        look = functools.partial(self._observe_later, seen, step, explain)
                        self._collectives.observe(tensor, name, look)
                if gradient and tensor.requires_grad and tensor.is_floating_point():
                    self._observe_gradient(name + path, tensor, step, call, cls, own_tags, shard)
            if origins is not None and not again:
                origins.passed(name, output)
        except Exception as error:
            observer.fault(name, error)

    def _observe_later(
        self, seen: Callable[[], tuple[Any, Any]], step: int, explain: Explain | None
    ) -> None:
        self.observer.observe(*seen(), step, None, explain)

    def _count(
        self, wanted: ModuleCall, name: str, again: bool, replica: bool, output: Any
    ) -> ModuleCall | None:
        """Return where this call is counted and what to capture of it; None to ignore it.

        A `replica` is a copy of the module that DataParallel made for one call.
        """
        if again:  # a backward pass goes from the last call to the first
            calls = self._recomputable.get(name)
            call = calls.pop() if calls else 0
        else:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            self._recomputable.setdefault(name, []).append(call)
        return wanted._replace(step=self.observer.step_number, call=call)

    def _known_stats(self, gradient: torch.Tensor) -> Summary | None:
        """Return the statistics of a gradient that was just observed under another name.

        The output of a module is often that of its last child, and nothing runs between two hooks
        on one tensor.
        """
        last, version, stats = self._last
        return stats if last() is gradient and version == private.version_of(gradient) else None

    def _observe_gradient(
        self,
        name: str,
        tensor: torch.Tensor,
        step: int,
        call: int,
        cls: str,
        tags: dict[str, str],
        shard: Shard | None,
    ) -> None:
        passes: list[int] = []
        explain: Explain | None = None
        if self._origins is not None:
            of_gradient, uses = self._origins.of_gradient, self._origins.uses(tensor)
            explain = lambda stats: of_gradient(uses)  # noqa: E731
        shape = tensor.shape

        def on_gradient(gradient: torch.Tensor | None) -> None:
            observer = self.observer
            this_pass = private.backward_pass()
            if gradient is None or not observer.active or this_pass in passes:
                return
            passes.append(this_pass)
            all_tags = tags if len(passes) == 1 else {**tags, "backward": str(len(passes))}

            def look() -> None:
                whole = gradient if gradient.shape == shape else gradient.reshape(shape)
                seen = observed(name, Kind.GRADIENT, whole, call, cls, all_tags, shard)
                stats = observer.observe(*seen, step, self._known_stats(gradient), explain)
                self._last = weakref.ref(gradient), private.version_of(gradient), stats

            try:
                self._collectives.poll()
                self._collectives.observe(gradient, name, look)
            except Exception as error:
                observer.fault(name, error)

        hide_from_compiler(on_gradient)
        handle = tensor.register_hook(on_gradient)
        if tensor.is_leaf:  # the module returned a parameter as it is
            before, self._leaf_handles[name] = self._leaf_handles.get(name), handle
            if before is not None:
                before.remove()
        base = private.base_of(tensor)
        if base is not None and base.grad_fn is not None and base.numel() == tensor.numel():
            # a later in-place operation would take the view's own node out of the graph
            number = base.output_nr
            base.grad_fn.register_prehook(lambda gradients: on_gradient(gradients[number]))
