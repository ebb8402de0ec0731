"""Hooks on the gradients of modules' outputs, and tensors that are not computed yet."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tensortap.core.record import Kind, Shard, Summary
from tensortap.rooms.track.observing import Explain, HookObserver
from tensortap.rooms.track.torch import internals
from tensortap.rooms.track.torch.descriptions import Descriptions
from tensortap.rooms.track.torch.hooks import WHOLE, skip_code
from tensortap.values.torch import private
from tensortap.values.torch.hidden import constant_when_compiled, hide_from_compiler

CHANGED = "a collective computed its output, which was changed in place before it could be read"


INSIDE = "a compiled graph returns it, and what the graph itself adds to its gradient is not seen"
_compiling: Callable[[], bool] = torch.compiler.is_compiling


class OutputPlace(NamedTuple):
    """Name, step and call of an observed output, for the record of its gradient."""

    name: str
    type: str
    step: int
    call: int
    tags: dict[str, str] = {}  # noqa: RUF012  never changed
    shard: Shard | None = None


class ObservedGradient(NamedTuple):
    """The gradient that was observed last, and its statistics if they are known."""

    gradient: Any  # a weak reference
    version: int
    stats: Summary | None


class GradientHook:
    """A hook on one output; neither compilers nor pickles see it."""

    __slots__ = (
        "_compiled",
        "_description",
        "_gradients",
        "_note",
        "_passes",
        "_place",
        "_shape",
        "_uses",
    )

    def __init__(
        self,
        gradients: weakref.ref[OutputGradients],
        place: OutputPlace,
        shape: torch.Size,
        uses: list[str] | None,
        note: Callable[[], None],
        compiled: bool = False,
        description: Any = None,
    ) -> None:
        self._gradients = gradients  # the model may keep this output, which must not keep the model
        self._place = place
        self._shape = shape
        self._uses = uses
        self._description = description
        self._note = note
        self._compiled = compiled
        self._passes: list[int] = []

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if not _compiling():
            self._look(gradient)
        elif internals.may_break():
            self._look(gradient)  # hidden, so the graph ends here
        else:
            self._note()

    def _look(self, gradient: torch.Tensor | None) -> None:
        gradients, place = self._gradients(), self._place
        if gradients is None:
            return
        if gradient is None:
            if self._compiled and gradients.observer.active:
                gradients.observer.unseen[place.name] = INSIDE
            return
        description = self._description
        if description is None or not gradients.context.add_gradient(
            description, gradient, self._shape, place.step, place.call, self._passes
        ):
            self._observe(gradients, gradient)

    def _observe(self, gradients: OutputGradients, gradient: torch.Tensor) -> None:
        observer, this_pass = gradients.observer, private.backward_pass()
        if this_pass in self._passes or not observer.active:
            return
        self._passes.append(this_pass)
        place, passes = self._place, len(self._passes)
        if passes > 1:
            place = place._replace(tags={**place.tags, "backward": str(passes)})
        try:
            gradients.observe(place, gradient, self._shape, self._uses)
        except Exception as error:
            observer.fault(place.name, error)

    def on_gradients(self, number: int, gradients: Any) -> None:
        """Look at one of the gradients that a node of the graph gets."""
        self(gradients[number])


hide_from_compiler(GradientHook._look)
for _function in (GradientHook.__call__, GradientHook._look, GradientHook.on_gradients):
    skip_code(_function.__code__)
torch.utils.hooks.unserializable_hook(GradientHook)


class AwaitedTensor(NamedTuple):
    """A tensor to look at when its collective is done."""

    result: Any
    version: int
    name: str
    look: Callable[[], object]


class Collectives:
    """Tensors that a collective is still computing, observed once the program has used them.

    Waiting in a hook would end the overlap of communication with work. The program itself waits
    when it first uses the tensor, so the next hook finds it complete. A view of it is waited for
    in its place: then the tensor is observed a few hooks later, when the collective is long done.
    """

    def __init__(self, observer: HookObserver) -> None:
        self._observer = observer
        self.waiting: collections.deque[AwaitedTensor] = collections.deque()

    def observe(self, tensor: Any, name: str, look: Callable[[], object]) -> None:
        """Call `look`, at once or when the collective that computes the tensor is done."""
        result = internals.running_collective(tensor)
        if result is None:
            look()
            return
        version = private.version_of(internals.result_of(result))
        self.waiting.append(AwaitedTensor(result, version, name, look))

    def poll(self, most: int = 4) -> None:
        """Look at the tensors that are complete, and at the oldest ones beyond `most`.

        Each that is kept waiting is memory that the program may have freed.
        """
        while self.waiting and (self.waiting[0].result.completed or len(self.waiting) > most):
            result, version, name, look = self.waiting.popleft()
            try:
                if private.version_of(internals.result_of(result)) != version:
                    self._observer.unseen[name] = CHANGED
                    continue
                look()
            except Exception as error:
                self._observer.fault(name, error)


class OutputGradients:
    """Observes the gradients of the outputs of one model."""

    def __init__(
        self,
        observer: HookObserver,
        origins: Any,
        descriptions: Descriptions,
        collectives: Collectives,
        context: Any = None,
    ) -> None:
        self.observer = observer
        self.context = context
        self._origins = origins
        self._descriptions = descriptions
        self._collectives = collectives
        self._leaf_handles: dict[str, Any] = {}  # hooks on tensors that outlive their step
        self._last = ObservedGradient(lambda: None, 0, None)
        self._this = weakref.ref(self)

        def note() -> None:
            observer.unseen["gradients"] = WHOLE

        constant_when_compiled(note)
        self._note = note

    def end_step(self) -> None:
        """Remove the hooks on tensors that outlive the step."""
        while self._leaf_handles:
            self._leaf_handles.popitem()[1].remove()

    def hook(self, tensor: torch.Tensor, place: OutputPlace, description: Any = None) -> None:
        """Observe the gradient of an output when it is computed.

        With the kernel's `description` of it, a plain one is added without Python.
        """
        uses = None if self._origins is None else self._origins.uses(tensor)
        compiled = internals.is_compiled(tensor)
        hook = GradientHook(
            self._this, place, tensor.shape, uses, self._note, compiled, description
        )
        handle = tensor.register_hook(hook)
        if tensor.is_leaf:  # the module returned a parameter as it is
            before = self._leaf_handles.get(place.name)
            self._leaf_handles[place.name] = handle
            if before is not None:
                before.remove()
        base = internals.base_of(tensor)
        if base is not None and base.grad_fn is not None and base.numel() == tensor.numel():
            # a later in-place operation would take the view's own node out of the graph
            base.grad_fn.register_prehook(functools.partial(hook.on_gradients, base.output_nr))

    def observe(
        self, place: OutputPlace, gradient: torch.Tensor, shape: torch.Size, uses: list[str] | None
    ) -> None:
        """Observe a gradient, or have it observed once a collective has computed it."""
        self._collectives.poll()
        look = functools.partial(self._look, place, gradient, shape, uses)
        self._collectives.observe(gradient, place.name, look)

    def _look(
        self, place: OutputPlace, gradient: torch.Tensor, shape: torch.Size, uses: list[str] | None
    ) -> None:
        name, cls, step, call, tags, shard = place
        whole = gradient if gradient.shape == shape else gradient.reshape(shape)
        seen = self._descriptions.observed(name, Kind.GRADIENT, whole, call, cls, tags, shard)
        explain: Explain | None = None
        if self._origins is not None and uses is not None:
            explain = self._origins.of_gradient(uses, gradient)
        last, version = self._last, private.version_of(gradient)
        known = last.gradient() is gradient and last.version == version
        stats = self.observer.observe(*seen, step, last.stats if known else None, explain)
        self._last = ObservedGradient(weakref.ref(gradient), version, stats)
