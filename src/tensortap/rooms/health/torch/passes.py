"""Forward passes of a torch model: their mode, inputs and outputs, and the dtypes of layers.

Few of them are looked at. Samples of inputs and outputs in the memory of the CPU are read.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from tensortap.capture.pipeline import pipeline
from tensortap.rooms.health.steps import PassFacts, ProbeFacts
from tensortap.rooms.health.torch.probe import (
    MOST_SECONDS,
    compare_modes,
    has_norm_with_modes,
    probe,
    why_not,
)
from tensortap.rooms.track.observing import inputs_of, tensors_in
from tensortap.rooms.track.torch.hooks import ModuleHook, hook_module
from tensortap.rooms.track.torch.reading import is_plain, sample
from tensortap.values.torch.hidden import hide_from_compiler
from tensortap.values.torch.private import backward_pass
from tensortap.values.torch.tensors import quiet

_EARLY = 100  # steps in which inputs are compared with labels
_FEW = 20  # steps in which inputs of embeddings and batch norms are looked at
_MOST_KEPT = 1 << 20  # values of an input
_COMPARED_MODES = (25, 50, 100)  # steps after which batch norm should know its statistics
_computed: list[Any] = []  # weak: what models have returned lately
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def is_checked(number: int) -> bool:
    """Return whether values are looked at in a step, counted from where tracking began.

    >>> [number for number in range(400) if is_checked(number)][-5:]
    [80, 90, 100, 200, 300]
    """
    return number % (10 if number <= 100 else 100) == 0


class _Pass:
    """A forward pass that is looked at."""

    def __init__(self, training: bool, given: torch.Tensor | None) -> None:
        self.training, self.gradients = training, torch.is_grad_enabled()
        self.rms: float | None = None
        with quiet():
            if given is not None and is_plain(given):
                self.rms = _rms(given)
        self.random = False
        self.generator = None if training else torch.get_rng_state()

    def facts(self) -> PassFacts:
        return PassFacts(self.training, self.gradients, self.rms, self.random)


class PassWatch:
    """Watches the forward passes of a model, and in which dtypes its layers compute.

    Of a model whose parts are called one by one, the parts are watched.
    """

    def __init__(self, root: nn.Module, guarded: Callable[..., None]) -> None:
        self._root = root
        self._guarded = guarded
        self._number = self._evaluations = 0
        self._passes: list[_Pass] = []
        self._running: _Pass | None = None
        self._outer: nn.Module | None = None  # the module whose call no other one surrounds
        self._began = 0.0  # when it was called
        self._caught = 0  # calls of `catch` until then
        self._probed: dict[int, ProbeFacts] = {}  # by the id of the module
        self._has_norm = has_norm_with_modes(root)
        self.entries: list[torch.Tensor] = []  # what the model was first given, and other tokens
        self._last: tuple[Any, torch.Tensor] | None = None  # that of the last one: weak, a sample
        self.has_trained = self.was_evaluated = False  # whether there has been such a pass
        self._indices: dict[str, tuple[int, int]] = {}  # embeddings → the only index, how often
        self._forget()

    def _forget(self) -> None:
        self.entries = []
        self._same: bool | None = None
        self._is_all = False  # whether the last step had the same tensor
        self._new_probes: list[ProbeFacts] = []
        self._mode_distance: float | None = None
        self._padding: bool | None = None
        self._small: dict[str, None] = {}

    def attach(self) -> list[Callable[[], None]]:
        """Hook into the model; return functions that undo this."""
        undo: list[Callable[[], None]] = []
        for module in _outer_modules(self._root):
            before = ModuleHook(functools.partial(self._guarded, self._before))
            after = ModuleHook(functools.partial(self._guarded, self._after))
            undo.append(hook_module(module, before, before=True, with_kwargs=True))
            undo.append(hook_module(module, after, with_kwargs=True))
        for name, module in self._root.named_modules():
            if isinstance(module, nn.Embedding):
                look = functools.partial(self._guarded, self._on_embedding, name)
                undo.append(hook_module(module, ModuleHook(look)))
            elif isinstance(module, _NORMS):
                look = functools.partial(self._guarded, self._on_norm, name)
                undo.append(hook_module(module, ModuleHook(look), before=True))
        return undo

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._outer is not None or backward_pass() != -1:
            return
        self._outer, self._began = module, time.perf_counter()
        if self._number in (2, *_COMPARED_MODES):
            self._caught = _catches()
        trains = torch.is_grad_enabled() and vars(module).get("training", True)
        self.has_trained |= trains
        self.was_evaluated |= not trains
        if module is self._root:
            self._on_inputs(module, args, kwargs)
        if trains and not self.entries and self._number <= _EARLY:
            given = [tensor for _, tensor in inputs_of(args, kwargs, torch.Tensor)]
            first = next(iter(given), None)
            if first is not None and first.numel() <= _MOST_KEPT and is_plain(first):
                tokens = [each for each in given[1:3] if each.dtype is torch.long]
                with quiet():
                    self.entries = [
                        each.detach().clone() for each in (first, *tokens)
                        if each.numel() <= _MOST_KEPT and is_plain(each)
                    ]  # fmt: skip
                    self._compare(first)

    def _compare(self, given: torch.Tensor) -> None:
        """Note whether the batch is that of the last step, though not the same tensor."""
        now = sample(given)
        if self._last is not None:
            other, before = self._last
            kept = other()  # a program that trains with all of its data has one tensor
            self._is_all = kept is not None and (kept is given or kept is given._base)
            if not self._is_all:
                self._same = len(given) > 1 and torch.equal(before, now)
        self._last = weakref.ref(given if given._base is None else given._base), now

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._outer is not module:
            return
        self._outer = None
        _computed.extend(weakref.ref(each) for _, each in tensors_in(output, torch.Tensor))
        seconds = time.perf_counter() - self._began
        if module is self._root:
            self._on_output(module, args, output)
        if torch.is_grad_enabled() and vars(module).get("training", True):
            self._probe(module, args, kwargs, seconds)

    def _probe(self, module: nn.Module, args: Any, kwargs: Any, seconds: float) -> None:
        module = vars(module)["_modules"].get("_orig_mod", module)  # of torch.compile
        compares = self._has_norm and self._number in _COMPARED_MODES
        probes = self._number == 2 and id(module) not in self._probed and len(self._probed) < 8
        if not (compares or probes):
            return
        reason = "a forward pass takes too long" if seconds > MOST_SECONDS else ""
        if _catches() != self._caught:  # a copy would catch values, too, and count as calls
            reason = "its forward pass catches values"
        reason = reason or why_not(module, args, kwargs)
        if probes:
            facts = ProbeFacts(reason)
            self._probed[id(module)] = facts
            if not reason:
                try:
                    facts = probe(module, args, kwargs)
                    if self._is_all and self.entries[0].ndim == 2:  # as nodes of a graph
                        facts = facts._replace(rows=())
                except Exception as error:  # not every module can be copied or called again
                    facts = ProbeFacts(f"{type(error).__name__}: {error}"[:200])
            self._new_probes.append(facts)
        elif not reason and has_norm_with_modes(module):
            with contextlib.suppress(Exception):
                self._mode_distance = compare_modes(module, args, kwargs)

    @property
    def has_evaluated(self) -> bool:
        return any(not (each.training and each.gradients) for each in self._passes)

    def end_step(self) -> tuple[tuple[PassFacts, ...], dict[str, Any]]:
        """Return the passes of the step, and more facts about them; begin the next one."""
        found = tuple(each.facts() for each in self._passes)
        self._passes, self._running, self._outer = [], None, None
        _computed[:] = [each for each in _computed[-64:] if each() is not None]
        extra = {
            "probes": tuple(self._new_probes), "mode_distance": self._mode_distance,
            "small_batches": tuple(self._small), "same_input": self._same,
            "padding": self._padding,
            "one_index": tuple(
                (name, index) for name, (index, count) in self._indices.items() if count == 5
            ),
        }  # fmt: skip
        self._number += 1
        self._forget()
        return found, extra

    def _on_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._running = None
        if len(self._passes) >= 8:  # which are enough of one step
            return
        training = self._root.training
        if training and torch.is_grad_enabled():
            looks = is_checked(self._number)
        else:
            self._evaluations += 1
            looks = is_checked(self._evaluations) or self._evaluations <= 16
        if looks:
            first = next((tensor for _, tensor in inputs_of(args, kwargs, torch.Tensor)), None)
            made = {_memory(tensor) for each in _computed if (tensor := each()) is not None}
            is_data = first is None or _memory(first) not in made  # not of a generator
            self._running = _Pass(training, first if is_data else None)
            self._passes.append(self._running)

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        before, running.generator = running.generator, None
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            # a dropout module that is left in train() mode is meant to be random
            running.random = not any(each.training for each in self._root.modules())

    def _on_norm(self, name: str, module: nn.Module, args: Any) -> None:
        if self._number < _FEW and module.training and torch.is_grad_enabled() and args:
            if vars(module).get("track_running_stats") and len(args[0]) == 1:
                self._small[name] = None

    def _on_embedding(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not (self._number < _FEW and torch.is_grad_enabled() and args and is_plain(args[0])):
            return
        with quiet():
            given = args[0].detach()
            before, count = self._indices.get(name, (int(given.reshape(-1)[0]), 0))
            # a model may well use one of few types
            types = vars(module).get("num_embeddings", 0)
            if given.numel() > 1 and types >= 8 and bool((given == before).all()):
                self._indices[name] = before, count + 1
            else:
                self._indices[name] = before, -1_000_000
            padded = _padded(given)
        if padded is not None and output.requires_grad:
            look = functools.partial(self._guarded, self._on_padding, padded)
            hide_from_compiler(look)
            output.register_hook(unserializable_hook(look))

    def _on_padding(self, padded: torch.Tensor, gradient: torch.Tensor) -> None:
        if is_plain(gradient) and gradient.shape[:2] == padded.shape:
            with quiet():
                sizes = gradient.detach().abs().amax(-1)
                self._padding = bool(sizes[padded].max() > 1e-3 * sizes.max())


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if is_plain(tensor) else 0


def _catches() -> int:
    """Return how often the program has called `catch`."""
    return sum(counter.calls for counter in pipeline.counters.values())


def _outer_modules(root: nn.Module) -> list[nn.Module]:
    """Return a model, and the parts of it that may be called one by one."""
    found, level = [root], [root]
    for _ in range(2):
        parts = [part for each in level for part in vars(each)["_modules"].values()]
        level = [part for part in parts if part is not None]
        found += level
    return list(dict.fromkeys(found))[:64]


def _padded(tokens: torch.Tensor) -> torch.Tensor | None:
    """Return which tokens are padding: a run of one token at the end, of different lengths.

    >>> _padded(torch.tensor([[5, 3, 0, 0], [4, 1, 2, 6], [3, 0, 0, 0]])).sum().item()
    5
    """
    if tokens.ndim != 2 or len(tokens) < 2 or tokens.shape[1] < 4 or tokens.numel() > _MOST_KEPT:
        return None
    last = tokens[:, -1].mode().values
    run = (tokens == last).flip(1).cumprod(1).flip(1).bool()
    lengths = run.sum(1)
    rows = lengths >= 2
    if rows.sum() < max(2, len(tokens) // 4) or len(lengths[rows].unique()) < 2:
        return None
    inside = (tokens == last) & ~run  # a token that also stands elsewhere is no padding
    return None if inside.sum() > run.sum() // 10 else run & rows.unsqueeze(1)


def _rms(tensor: torch.Tensor) -> float | None:
    """Return the root mean square of a sample of floats; None if it is not finite."""
    if not tensor.is_floating_point():
        return None
    rms = float(sample(tensor).double().square().mean().sqrt())
    return rms if math.isfinite(rms) else None  # other rules report it
