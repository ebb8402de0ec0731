"""Write down the state of a torch program before each step of its optimizers, as digests."""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensortap.rooms.program.torch.finding import Modules, free_name
from tensortap.rooms.track.observing import inputs_of
from tensortap.rooms.track.torch.optimizers import parameters_of
from tensortap.values.snapshot import digest_of
from tensortap.values.torch.hidden import hide_from_compiler, replace_when_compiled
from tensortap.values.torch.tensors import quiet


class StateRecorder:
    """Writes a line of digests before each step, and ends the program as a crash would.

    It ends after `steps` steps or, with `at_checkpoint`, after the first step from then on that is
    followed by a checkpoint: a call of `torch.save`.
    """

    def __init__(self, file: Path, steps: int, at_checkpoint: bool) -> None:
        self._file, self._last, self._at_checkpoint = file, steps, at_checkpoint
        self._modules = Modules()
        # in the order of their creation
        self._optimizers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._schedulers: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._steps = 0
        self._saved = self._inside = False  # a checkpoint; a call of a module
        self._batch: dict[str, str] = {}

    def attach(self) -> None:
        """Begin; nothing is put back, because the process ends with the program."""
        self._modules.attach()
        _after(torch.nn.Module, "__setstate__", self._modules.on_copy)
        known = {torch.optim.Optimizer: self._optimizers, LRScheduler: self._schedulers}
        for owner, instances in known.items():
            _after(owner, "__init__", lambda _, new, *args, to=instances: to.update({new: None}))
        _after(torch, "save", self._on_save)
        register_optimizer_step_pre_hook(self._before_step)
        call = torch.nn.Module.__call__

        def outermost(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            self._inside = True
            try:
                for name, tensor in inputs_of(args, kwargs, torch.Tensor):
                    self._batch[f"{len(self._batch)} ({name})"] = _digest(tensor)
                return call(module, *args, **kwargs)
            finally:
                self._inside = False

        replace_when_compiled(outermost, call)
        torch.nn.Module.__call__ = outermost

    def _on_save(self, *args: Any) -> None:
        self._saved |= self._steps >= self._last

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        ends = self._saved if self._at_checkpoint else self._steps == self._last
        with quiet(), self._file.open("a") as file:
            state = {} if ends else dict(self._state())  # an empty one says that it was ended here
            file.write(json.dumps(state) + "\n")
        if ends:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self._steps += 1
        self._batch.clear()

    def _state(self) -> Iterator[tuple[str, str]]:
        """Yield names and digests; what may explain a difference of others comes before them."""
        names: dict[int, str] = {}
        models: dict[str, torch.nn.Module] = {}
        for model in self._modules.models():
            models[free_name(type(model).__name__, models)] = model
        for title, model in models.items():
            for name, parameter in model.named_parameters():
                names[id(parameter)] = f"{title}.{name}"
                yield f"weight {title}.{name}", _digest(parameter)
        for number, optimizer in enumerate(self._optimizers):
            for index, parameter in enumerate(parameters_of(optimizer)):
                name = names.get(id(parameter), f"{number}.{index}")
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield f"optimizer state {name}.{key}", _digest(value)
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key != "params":
                        yield f"optimizer setting {key} of group {number}.{index}", _digest(value)
        for number, scheduler in enumerate(self._schedulers):
            for key, value in scheduler.state_dict().items():
                if not key.startswith("_"):
                    yield f"scheduler {type(scheduler).__name__} {number}.{key}", _digest(value)
        yield "random state of torch", _digest(torch.get_rng_state())
        yield "random state of Python", _digest(repr(random.getstate()))
        numbers = np.random.get_state()  # noqa: NPY002 - the generator that programs share
        yield "random state of NumPy", _digest(repr(numbers))
        yield from ((f"batch {name}", found) for name, found in self._batch.items())
        for title, model in models.items():  # batch norm has seen the batch by now
            for name, buffer in model.named_buffers():
                yield f"buffer {title}.{name}", _digest(buffer)


def _after(owner: Any, name: str, then: Any) -> None:
    """Call a function after another, with its result and its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(result, *args)
        return result

    hide_from_compiler(wrapped)
    setattr(owner, name, wrapped)


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return digest_of(value.detach()).hex()
    return repr(value)[:200]
