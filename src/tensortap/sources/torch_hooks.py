"""What a torch model does, observed by hooks: outputs, gradients, weights, optimizer state."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tensortap.record import Kind, Shard
from tensortap.session import session
from tensortap.sources.observer import Observer, Seen
from tensortap.sources.outputs import leaves
from tensortap.sources.torch_names import Names, compilation, unwrapped

log = logging.getLogger("tensortap")

_current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class TorchHooks:
    """Hooks on a model and its optimizer; `attach` and `detach` them, `end_step` at each step."""

    def __init__(self, root: torch.nn.Module, optimizer: Any, observer: Observer) -> None:
        self.root = root
        self.observer = observer
        self.optimizers = _optimizers(optimizer)
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self._recomputed: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._shared: dict[str, str] = {}
        self._updates: dict[str, int] = {}
        self._gradients_seen: set[str] = set()
        self._accumulated: set[str] = set()
        self._early: dict[str, torch.Tensor] = {}
        self._early_needed = True
        self._compiled = False

    # -- begin and end -------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks in place."""
        settings = self.observer.settings
        names = Names(self.root)
        whole = [m for m in self.root.modules() if getattr(compilation(m), "fullgraph", False)]
        closed = {id(inside) for outer in whole for inside in outer.modules()}
        self._compiled = any(compilation(m) is not None for m in self.root.modules())
        if self._compiled:
            torch._dynamo.reset()  # what is compiled already knows nothing of hooks
        for name, module in names.modules():
            if id(module) in closed:
                # a hook would have to break the graph, and that raises in the user's program
                self.observer.unseen[name] = "it is part of a graph compiled with fullgraph=True"
            else:
                self._attach_module(module, name)
        for outer in whole:
            if "_orig_mod" in outer._modules:  # called from outside of the graph
                name = names.plain(_path_of(self.root, outer)) or type(unwrapped(outer)).__name__
                self._attach_module(outer, name)
                self.observer.unseen.pop(name, None)
        self._name_parameters()
        if settings.weights and settings.gradients:
            self._attach_parameters()

    def _attach_module(self, module: torch.nn.Module, name: str) -> None:
        settings, patterns = self.observer.settings, self.observer.patterns
        activation = settings.activations and patterns.wants(Kind.ACTIVATION, name)
        gradient = settings.gradients and patterns.wants(Kind.GRADIENT, name)
        if not (activation or gradient):
            return
        cls = type(module)
        kind = f"{cls.__module__}.{cls.__qualname__}"
        hook = functools.partial(self._on_output, name, kind, activation, gradient)
        self._handles.append(module.register_forward_hook(_undisturbed(hook)))

    def _attach_parameters(self) -> None:
        if self.optimizers:
            for optimizer in self.optimizers:
                for over, register in (
                    (False, optimizer.register_step_pre_hook),
                    (True, optimizer.register_step_post_hook),
                ):
                    hook = functools.partial(self._on_optimizer_step, over)
                    self._handles.append(register(_undisturbed(hook)))
            return
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and self._wants(Kind.WEIGHT_GRADIENT, name):
                hook = functools.partial(self._on_accumulated, name)
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(_undisturbed(hook))
                )

    def detach(self) -> None:
        """Remove every hook."""
        while self._handles:
            self._handles.pop().remove()
        if self._compiled:
            torch._dynamo.reset()

    # -- outputs and their gradients -----------------------------------------------------

    def _on_output(
        self,
        name: str,
        kind: str,
        activation: bool,
        gradient: bool,
        module: torch.nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        observer = self.observer
        if not observer.on or not session.enabled:
            return
        try:
            training = self.root.training
            if observer.settings.only_training and not training:
                return
            recomputed = _current_graph_task() != -1
            call = self._call_of(name, recomputed)
            tags = {} if training else {"mode": "eval"}
            marked = {**tags, "recompute": "1"} if recomputed else tags
            for path, tensor in leaves(output, torch.Tensor):
                label = name + path
                if activation:
                    self._observe(label, Kind.ACTIVATION, tensor, call, kind, marked)
                if gradient and tensor.requires_grad and tensor.is_floating_point():
                    self._watch_gradient(label, tensor, call, kind, tags)
        except Exception as error:
            session.fault(name, error)

    def _call_of(self, name: str, recomputed: bool) -> int:
        """Which call of the module within the step this is."""
        made = self._calls.get(name, 0)
        if not recomputed:
            self._calls[name] = made + 1
            return made
        # a checkpoint computes again in the backward pass: the last call first
        again = self._recomputed.get(name, 0)
        self._recomputed[name] = again + 1
        return max(0, made - 1 - again)

    def _watch_gradient(
        self, name: str, tensor: torch.Tensor, call: int, kind: str, tags: dict[str, str]
    ) -> None:
        task: list[int] = []
        shape = tensor.shape
        step = self.observer.step_number

        def on_gradient(gradient: torch.Tensor | None) -> None:
            observer = self.observer
            if gradient is None or not observer.active:
                return
            current = _current_graph_task()
            if current in task:
                return
            task.append(current)
            try:
                if gradient.shape != shape:
                    gradient = gradient.reshape(shape)
                said = tags if len(task) == 1 else {**tags, "backward": str(len(task))}
                self._observe(name, Kind.GRADIENT, gradient, call, kind, said, step)
            except Exception as error:
                session.fault(name, error)

        on_gradient._torchdynamo_disable = True  # type: ignore[attr-defined]
        tensor.register_hook(on_gradient)
        base = tensor._base if tensor._is_view() else None
        if base is not None and base.grad_fn is not None and base.numel() == tensor.numel():
            # an in-place operation that follows takes the view's own node out of the graph
            number = base.output_nr
            base.grad_fn.register_prehook(lambda grads: on_gradient(grads[number]))

    # -- weights, their gradients, optimizer state ---------------------------------------

    def _name_parameters(self) -> None:
        """Parameters may come and go: lazy ones, adapters."""
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._names.clear()
        self._shared.clear()
        for name, parameter in Names(self.root).parameters():
            first = self._names.setdefault(id(parameter), name)
            if first == name:
                self._parameters[name] = parameter
            else:
                self._shared[first] = " ".join(filter(None, (self._shared.get(first), name)))

    def _wants(self, kind: Kind, name: str) -> bool:
        return self.observer.patterns.wants(kind, name)

    def _on_optimizer_step(self, over: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.observer.on or not session.enabled:
            return
        # a closure computes them within the step: before it they are those of the step before
        closure = any(callable(given) for given in (*args[1:], *kwargs.values()))
        if closure is not over:
            return
        for place, parameter in enumerate(_parameters_of(optimizer)):
            if parameter.grad is not None:
                self._observe_gradient(self._name_of(parameter, optimizer, place), parameter.grad)

    def _name_of(self, parameter: torch.nn.Parameter, optimizer: Any, place: int) -> str:
        """Its name in the model, or its place in the optimizer if it is none of the model's."""
        number = self.optimizers.index(optimizer)
        return self._names.get(id(parameter)) or f"optimizer{number or ''}.{place}"

    def _on_accumulated(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Without an optimizer nobody says when gradients are complete, or that they are gone."""
        if not self.observer.on or not session.enabled:
            return
        self._accumulated.add(name)
        if self._early_needed and parameter.grad is not None:
            try:
                self._early[name] = parameter.grad.detach().clone()
            except Exception as error:
                session.fault(name, error)

    def _observe_gradient(self, name: str, gradient: torch.Tensor) -> None:
        if not self._wants(Kind.WEIGHT_GRADIENT, name):
            return
        try:
            call = self._updates.get(name, 0)
            self._updates[name] = call + 1
            self._gradients_seen.add(name)
            tags = self._parameter_tags(name)
            self._observe(name, Kind.WEIGHT_GRADIENT, gradient, call, "", tags)
        except Exception as error:
            session.fault(name, error)

    def _parameter_tags(self, name: str) -> dict[str, str]:
        shared = self._shared.get(name)
        return {} if shared is None else {"shared": shared}

    def end_step(self) -> None:
        """Observe what is there once the optimizer has done its work."""
        settings = self.observer.settings
        if self.observer.on and session.enabled:
            self._name_parameters()
            if settings.weights and settings.gradients:
                self._late_gradients()
            if settings.weights:
                self._observe_weights()
            if settings.optimizer_state:
                self._observe_state()
        self._calls.clear()
        self._recomputed.clear()
        self._updates.clear()
        self._gradients_seen.clear()
        self._accumulated.clear()
        self._early.clear()

    def _late_gradients(self) -> None:
        """Gradients that no step of an optimizer has shown: as they are now, or were last."""
        rest = {
            name: parameter.grad
            for name, parameter in self._parameters.items()
            if name not in self._gradients_seen
        }
        gone = {n for n in self._accumulated if rest.get(n) is None or not bool(rest[n].any())}
        for name, gradient in rest.items():
            found = self._early.get(name) if name in gone else gradient
            if found is not None:
                self._observe_gradient(name, found)
        if gone and not self._early:
            log.warning(
                "tensortap: %d gradients were gone before tracker.step(); from the next step on "
                "they are taken as they are computed. track(model, optimizer=...) avoids this",
                len(gone),
            )
        if self._accumulated:
            # still there when the step ends: no need to keep copies
            self._early_needed = bool(gone)

    def _observe_weights(self) -> None:
        for name, parameter in self._parameters.items():
            if self._wants(Kind.WEIGHT, name):
                self._guarded(name, Kind.WEIGHT, parameter, self._parameter_tags(name))

    def _observe_state(self) -> None:
        for optimizer in self.optimizers:
            for place, parameter in enumerate(_parameters_of(optimizer)):
                state = optimizer.state.get(parameter)
                if not state:
                    continue
                name = self._name_of(parameter, optimizer, place)
                for key, value in state.items():
                    label = f"{name}.{key}"
                    if not self._wants(Kind.OPTIMISER_STATE, label):
                        continue
                    tags = {"state": str(key), "parameter": name, **self._parameter_tags(name)}
                    if isinstance(value, (int, float)):
                        value = torch.tensor(value, dtype=torch.float64)
                    for path, tensor in leaves(value, torch.Tensor):
                        self._guarded(label + path, Kind.OPTIMISER_STATE, tensor, tags)

    def _guarded(self, name: str, kind: Kind, tensor: torch.Tensor, tags: dict[str, str]) -> None:
        try:
            self._observe(name, kind, tensor, 0, "", tags)
        except Exception as error:
            session.fault(name, error)

    # -- one tensor ----------------------------------------------------------------------

    def _observe(
        self,
        name: str,
        kind: Kind,
        tensor: torch.Tensor,
        call: int,
        type_name: str,
        tags: dict[str, str],
        step: int | None = None,  # where it is not the one under way
    ) -> None:
        seen, local = self._seen(name, kind, tensor, call, type_name, tags)
        self.observer.observe(seen, local, step)

    def _seen(
        self,
        name: str,
        kind: Kind,
        tensor: torch.Tensor,
        call: int,
        type_name: str,
        tags: dict[str, str],
    ) -> tuple[Seen, torch.Tensor]:
        local = tensor.detach()
        shard = None
        if type(local) is not torch.Tensor:
            local, shard, more = _local(local)
            tags = {**tags, **more} if more else tags
        dtype = _DTYPES.get(local.dtype) or _dtype_name(local.dtype)
        seen = Seen(name, kind, call, type_name, dtype, tuple(local.shape), shard, tags)
        return seen, local


_DTYPES: dict[torch.dtype, str] = {}


def _dtype_name(dtype: torch.dtype) -> str:
    _DTYPES[dtype] = str(dtype).removeprefix("torch.")
    return _DTYPES[dtype]


def _undisturbed(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that torch.compile, where it is in use, leaves alone."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.disable(hook)  # type: ignore[no-any-return]
    return hook


# where it comes into use later
TorchHooks._on_output._torchdynamo_disable = True  # type: ignore[attr-defined]


def _path_of(root: torch.nn.Module, wanted: torch.nn.Module) -> str:
    found: dict[int, str] = {id(module): path for path, module in root.named_modules()}
    return found[id(wanted)]


def _optimizers(optimizer: Any) -> list[Any]:
    found = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in found:
        if each is not None and not hasattr(each, "param_groups"):
            raise TypeError(f"optimizer is a torch optimizer, or a list of them, not {each!r}")
    return [each for each in found if each is not None]


def _parameters_of(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, Shard | None, dict[str, str]]:
    """This rank's part of a distributed tensor, and which part it is."""
    if not hasattr(tensor, "to_local"):
        return tensor, None, {}
    placements = tuple(str(placement) for placement in tensor.placements)
    tags = {"placements": " ".join(placements), "mesh": str(tuple(tensor.device_mesh.shape))}
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    shard = Shard(tuple(tensor.shape), tuple(offsets), placements)
    return local.detach(), shard, tags
