"""Hooks that replace outputs of torch modules by recorded ones, and judge what they replace.

The value changes in the forward pass; gradients pass through as if the module had computed it.
Inputs and gradients are exchanged as well: then every module works on what the reference had, and
what differs is its own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tensortap.core.record import Kind
from tensortap.rooms.bisect.grafting import CallSite, GraftSource, Swap
from tensortap.rooms.bisect.torch.graft_parameters import (
    ParameterGrafts,
    computed_part,
    recorded_part,
)
from tensortap.rooms.bisect.torch.graft_segments import GraftedCall, Segments
from tensortap.rooms.track.observing import tensors_in
from tensortap.rooms.track.torch.hooks import ReplacingHook, hook_module
from tensortap.rooms.track.torch.layouts import like, local_part
from tensortap.rooms.track.torch.names import Names
from tensortap.values.snapshot import digest_of
from tensortap.values.torch import private


class Straight(torch.autograd.Function):  # type: ignore[misc]
    """Return another value; the gradient goes to the computed one as it is."""

    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, value: tuple[torch.Tensor]) -> torch.Tensor:
        ctx.shape = computed.shape
        if value[0].shape != computed.shape:
            return value[0].clone()
        # in the same order in memory, on which kernels depend: the mask of a dropout, sums
        return torch.empty_like(computed).copy_(value[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        (gradient,) = gradients
        if gradient.shape != ctx.shape:  # a wrong module: its gradient means nothing
            gradient = gradient.new_zeros(ctx.shape)
        return gradient, None


def graft(model: Any, source: GraftSource) -> ModelGrafts | None:
    """Return hooks that exchange tensors with recorded ones; None if it is no torch model."""
    return ModelGrafts(model, source) if isinstance(model, torch.nn.Module) else None


class ModelGrafts:
    """Hooks on the modules of a model that exchange tensors with a source."""

    def __init__(self, root: torch.nn.Module, source: GraftSource) -> None:
        self._root = root
        self._source = source
        self._undo: list[Callable[[], object]] = []
        # inputs of the calls so far, of modules with several: a checkpoint may repeat them
        self._calls: dict[str, list[bytes]] = {}
        self._stack: list[GraftedCall] = []
        self._repeated: list[GraftedCall] = []  # of which a checkpoint may leave some
        self._known: dict[int, Any] = {}  # tensors that are as in the reference, by id
        self._random: Any = None  # the last random state
        self._segments = Segments()
        self._parameters = ParameterGrafts(root, source)
        self.load, self.begin = self._parameters.load, self._parameters.begin
        # outputs whose gradient has not come yet: what computed them, by call and path
        self._awaited: dict[tuple[CallSite, str], Any] = {}
        self._arrived: set[CallSite] = set()  # calls with an output whose gradient has come
        self.stepping: Callable[[Any], object] | None = None

    def attach(self) -> None:
        self._parameters.stepping = self.stepping
        stance = torch.compiler.set_stance("force_eager")
        stance.__enter__()
        self._undo.append(functools.partial(stance.__exit__, None, None, None))
        for name, module in Names(self._root).modules():
            hook = ReplacingHook(functools.partial(self._on_call, name))
            self._undo.append(hook_module(module, hook, before=True, with_kwargs=True))
            hook = ReplacingHook(functools.partial(self._on_output, name))
            self._undo.append(hook_module(module, hook, with_kwargs=True))
        self._parameters.attach()

    def detach(self) -> None:
        self._parameters.detach()
        while self._undo:
            self._undo.pop()()
        self._calls.clear()
        self._stack.clear()
        self._repeated.clear()
        self._known.clear()
        self._awaited.clear()
        self._arrived.clear()
        self._segments = Segments()

    def end_step(self) -> None:
        self._judge_missing()
        self._parameters.end_step()

    def _judge_missing(self) -> None:
        """Judge gradients of the reference that the program has not computed: the graph is cut."""
        for (site, path), node in self._awaited.items() if self._arrived else ():
            if site in self._arrived:  # the module itself reads what else it returns
                continue
            found = self._source.recorded(site.module + path, Kind.GRADIENT, site.call)
            if found is not None:
                missing = {each for each in self._awaited.values() if each is not node}
                suspects = self._segments.cut_by(node, site, missing)
                self._source.swap(Swap(
                    site.module + path, Kind.GRADIENT, None, found, site,
                    readers=functools.partial(tuple, suspects),
                ))  # fmt: skip

    @property
    def running(self) -> str:
        return self._stack[-1].site.module if self._stack else ""

    def _counts(self) -> bool:
        return self._root.training or self._source.evaluates

    # -- inputs ----------------------------------------------------------------------------------

    def _on_call(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._counts():
            return None
        again = private.backward_pass() != -1  # a checkpoint recomputes what was replaced before
        call = self._count(name, (args, kwargs), again)
        stack = self._repeated if again else self._stack
        if not again:
            self._note_random()
        opened = GraftedCall(CallSite(name, call, stack[-1].site if stack else None))
        stack.append(opened)
        exchange = functools.partial(self._exchange_input, opened, module, again)
        given = map_tensors({**dict(enumerate(args)), **kwargs}, torch.Tensor, exchange, ".input")
        new_args = tuple(given[index] for index in range(len(args)))
        return new_args, {key: given[key] for key in kwargs}

    def _count(self, name: str, inputs: Any, again: bool) -> int:
        """Return which call of a module this is; one that is repeated has the same inputs."""
        calls = self._calls.setdefault(name, [])
        given = b""
        if self._source.calls(name) > 1:
            given = b"".join(
                digest_of(computed_part(x)) for _, x in tensors_in(inputs, torch.Tensor)
            )
        if not again:
            calls.append(given)
            return len(calls) - 1
        return max((i for i, each in enumerate(calls) if each == given), default=0)

    def _exchange_input(
        self, opened: GraftedCall, module: torch.nn.Module, again: bool, path: str, tensor: Any
    ) -> Any:
        name, call, parent = opened.site
        known = self._is_known(tensor) or parent is None
        found = self._recorded(name + path, Kind.ACTIVATION, call, tensor)
        if found is not None:
            around = self._stack[-2] if self._stack[1:] else None
            if not again:
                self._source.swap(Swap(
                    name + path, Kind.ACTIVATION, computed_part(tensor), found, opened.site, True,
                    random=around is not None and around.random,
                    certain=around is None or around.certain,
                ))  # fmt: skip
            if not _same_bits(computed_part(tensor), found):
                if vars(module).get("inplace"):  # whoever else has the tensor sees it change
                    tensor.data.copy_(found)
                else:
                    tensor = _with_value(tensor, found)
        known = known or found is not None
        opened.certain = opened.certain and known
        if known:
            self._know(tensor)
        opened.read(tensor)
        return tensor

    def _know(self, tensor: torch.Tensor) -> None:
        self._known[id(tensor)] = weakref.ref(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor

    def _note_random(self) -> None:
        """Note for the innermost module whether random numbers were drawn since the last call."""
        state = _random_state()
        if self._stack and self._random is not None and state != self._random:
            self._stack[-1].random = True
        self._random = state

    # -- outputs ---------------------------------------------------------------------------------

    def _on_output(
        self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        if not self._counts():
            return None
        again = private.backward_pass() != -1
        if not again:
            self._note_random()
        stack = self._repeated if again else self._stack
        while (opened := stack.pop()).site.module != name:
            pass  # it raised, and somebody has caught that
        inputs = {id(each) for _, each in tensors_in((args, kwargs), torch.Tensor)}
        exchange = functools.partial(self._exchange_output, opened, inputs, again)
        return map_tensors(output, torch.Tensor, exchange)

    def _exchange_output(
        self, opened: GraftedCall, inputs: set[int], again: bool, path: str, tensor: Any
    ) -> Any:
        name, call, _ = opened.site
        found = self._recorded(name + path, Kind.ACTIVATION, call, tensor)
        start = tensor.grad_fn
        in_place = id(tensor) in inputs and opened.changed(tensor)
        if found is not None:
            if not again:
                self._source.swap(Swap(
                    name + path, Kind.ACTIVATION, computed_part(tensor), found, opened.site,
                    random=opened.random, certain=opened.certain,
                ))  # fmt: skip
            if not in_place:
                tensor = _with_value(tensor, found)
            elif not _same_bits(computed_part(tensor), found):
                local_part(tensor.data).copy_(found)
        if found is not None:
            self._know(tensor)
        if tensor.requires_grad and tensor.grad_fn is not None:
            self._segments.add(opened, start, tensor.grad_fn)
            if not again:
                self._awaited[opened.site, path] = tensor.grad_fn
            hook = functools.partial(self._on_gradient, opened.site, path, tensor.grad_fn)
            tensor.register_hook(torch.utils.hooks.unserializable_hook(hook))
        return tensor

    # -- gradients -------------------------------------------------------------------------------

    def _on_gradient(self, site: CallSite, path: str, node: Any, gradient: Any) -> Any:
        self._awaited.pop((site, path), None)
        self._arrived.add(site)
        found = self._recorded(site.module + path, Kind.GRADIENT, site.call, gradient)
        if found is None:
            return None
        readers = functools.partial(self._segments.readers, node, site)
        self._source.swap(Swap(
            site.module + path, Kind.GRADIENT, computed_part(gradient), found, site, readers=readers
        ))  # fmt: skip
        return like(gradient, found)

    def _recorded(self, name: str, kind: Kind, call: int, tensor: Any) -> torch.Tensor | None:
        data = self._source.recorded(name, kind, call)
        return None if data is None else recorded_part(data, tensor)


def _with_value(computed: Any, value: torch.Tensor) -> Any:
    result: Any = Straight.apply(computed, (like(computed, value),))
    return result


def _same_bits(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        return False
    flat = (each.detach().cpu().contiguous().reshape(-1) for each in (tensor, value))
    one, other = (each.view(torch.uint8) for each in flat)
    return bool(torch.equal(one, other))


def _random_state() -> bytes:
    """Return the random states of all devices in use, to tell whether they have changed."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return b"".join(state.numpy().tobytes() for state in states)


def map_tensors(
    value: Any, tensor: type, function: Callable[[str, Any], Any], path: str = "", depth: int = 0
) -> Any:
    """Return the value with `function` applied to each tensor in it and its path.

    Containers with a tensor that changes are copied; everything else stays as it is.

    >>> map_tensors({"a": (1.5, "b")}, float, lambda path, x: f"{path} {x}")
    {'a': ('[a][0] 1.5', 'b')}
    """
    if isinstance(value, tensor):
        return function(path, value)
    if value is None or isinstance(value, (str, bytes, int, float)) or depth > 20:
        return value

    def changed(key: Any, item: Any) -> Any:
        return map_tensors(item, tensor, function, f"{path}[{key}]", depth + 1)

    if isinstance(value, Mapping):
        found = {key: changed(key, item) for key, item in value.items()}
        if all(found[key] is item for key, item in value.items()):
            return value
        copied: Any = copy.copy(value)
        for key, item in found.items():
            copied[key] = item
        return copied
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", range(len(value)))
        items = [changed(key, item) for key, item in zip(names, value, strict=False)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            if (new := changed(field.name, item)) is not item:
                object.__setattr__(copied, field.name, new)
        return copied
    return value
