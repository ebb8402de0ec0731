"""Learning rate schedulers, loss scalers and data loaders of a training program.

Nobody hands them to `track`, and they have no hooks: they are found among the objects of the
garbage collector, once, and asked how far they are.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from tensortap.frameworks.steps import ScheduleFacts
from tensortap.frameworks.torch.private import is_scaled_by

Counts = dict[int, int]  # by id of a scheduler

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class ScheduleWatch:
    """Watches the schedulers and scalers of some optimizers.

    `shuffled` has the number of batches of each DataLoader that is to shuffle.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.shuffled: tuple[int, ...] = ()
        self._optimizers = optimizers
        self._schedulers: list[weakref.ref[LRScheduler]] = []
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] = []
        self._first: Counts = {}  # when tracking began
        self._computed: Counts | None = None  # when the last gradient was computed
        self._stepped: Counts = {}  # at the last step of the optimizer
        self._started = False
        self._forget()

    def _forget(self) -> None:
        self._early = self._skipped_first = False
        self._most: int | None = None
        self._scaler: torch.amp.GradScaler | None = None

    def begin(self) -> None:
        """Note how far the schedulers are that exist already."""
        self._find()
        self._first = self._counts(None)

    def _find(self) -> None:
        bases = LRScheduler, torch.amp.GradScaler, DataLoader
        wanted = {id(each) for base in bases for each in (base, *_subclasses(base))}
        found = [each for each in gc.get_objects() if id(type(each)) in wanted]
        ours = {id(optimizer) for optimizer in self._optimizers}
        self._scalers = [
            weakref.ref(each) for each in found if isinstance(each, torch.amp.GradScaler)
        ]
        self._schedulers = [
            weakref.ref(each) for each in found if id(getattr(each, "optimizer", None)) in ours
        ]
        loaders = [each for each in found if isinstance(each, DataLoader)]
        self.shuffled = tuple(length for each in loaders if (length := _shuffled_batches(each)))

    def _counts(self, optimizer: Any) -> Counts:
        """Return how often the schedulers of an optimizer, or of all, were stepped."""
        found = [scheduler for each in self._schedulers if (scheduler := each()) is not None]
        return {
            id(each): int(each.last_epoch)
            for each in found
            if optimizer is None or each.optimizer is optimizer
            if isinstance(getattr(each, "last_epoch", None), int)
        }

    def on_computed(self) -> None:
        """Note that a gradient has been computed."""
        if self._schedulers:
            self._computed = self._counts(None)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare how far the schedulers are with the last step of their optimizer."""
        self._look_again()
        for scaler in self._alive():
            if is_scaled_by(scaler, optimizer):
                self._scaler = scaler
        for number, count in self._counts(optimizer).items():
            last = self._stepped.get(number)
            if last is not None:
                self._most = max(self._most or 0, count - last)
            elif self._first.get(number) == 0 and count == 1:
                self._skipped_first = True
            if self._computed is not None and count > self._computed.get(number, count):
                self._early = True
            self._stepped[number] = count

    def _alive(self) -> list[torch.amp.GradScaler]:
        return [scaler for each in self._scalers if (scaler := each()) is not None]

    def _overrun(self) -> int | None:
        found = (each() for each in self._schedulers)
        cosines = (each for each in found if isinstance(each, CosineAnnealingLR))
        return next((each.T_max for each in cosines if each.last_epoch > each.T_max), None)

    def _look_again(self) -> None:
        """Look once more, for what was created after tracking began."""
        if not self._started:
            self._started = True
            self._find()

    def end_step(self, is_checked: bool, stepped: bool) -> ScheduleFacts:
        """Return the facts of the step, and begin the next one."""
        self._look_again()
        scale, scaler = None, self._scaler
        if not stepped and len(alive := self._alive()) == 1:
            scaler = alive[0]  # which skips the step of an optimizer
        if scaler is not None and is_checked and scaler.is_enabled():
            scale = float(scaler.get_scale())  # the scaler itself has waited for the device
        facts = ScheduleFacts(
            self._most, self._early, self._skipped_first, self._scaler is not None, scale,
            self.shuffled, self._overrun(),
        )  # fmt: skip
        self._computed = None
        self._forget()
        return facts


def _shuffled_batches(loader: DataLoader[Any]) -> int:
    """Return the number of batches of a loader that is to shuffle, else 0."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if not any(isinstance(each, _RANDOM) or _is_shuffled(each) for each in samplers):
        return 0
    try:
        return len(loader)
    except Exception:
        return 0  # its dataset does not know its length


def _is_shuffled(sampler: object) -> bool:
    return isinstance(sampler, DistributedSampler) and sampler.shuffle


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)
