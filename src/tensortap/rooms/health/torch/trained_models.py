"""Find the models that a torch program trains, without a change to the program."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensortap.rooms.track.torch.optimizers import parameters_of

Begin = Callable[[torch.nn.Module, Sequence[Any]], Callable[[], None]]
"""Called with a model and its optimizers; returns what to call at the end of each step."""

_PATIENCE = 100  # calls without a new model, after which nobody looks any longer


class TrainedModels:
    """Looks at the outermost modules that are called, until all optimizers have their model.

    A step of a model ends when all of its optimizers have made theirs.
    """

    def __init__(self, begin: Begin, fault: Callable[[Exception], None]) -> None:
        self._begin, self._fault = begin, fault
        self._call: Any = None  # the method that is replaced
        self._seen: set[int] = set()  # parameters of models that were found
        self._calls = 0

    def __enter__(self) -> TrainedModels:
        self.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Replace ``Module.__call__`` by a method that looks, and then calls it."""
        if self._call is not None:
            return
        self._call = call = torch.nn.Module.__call__
        look, attach, detach = self._look, self.attach, self.detach

        def first_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            detach()  # what it calls are parts of it, and a compiler must not see this
            wanted = look(module)
            try:
                return call(module, *args, **kwargs)
            finally:
                if wanted:
                    attach()

        torch.nn.Module.__call__ = first_call

    def detach(self) -> None:
        """Put the method back."""
        if self._call is not None:
            torch.nn.Module.__call__ = self._call
            self._call = None

    def _look(self, module: torch.nn.Module) -> bool:
        """Begin with a model if it is trained; return whether there may be more."""
        try:
            own = {id(parameter) for parameter in module.parameters()}
            if not own or not torch.is_grad_enabled():
                return True
            self._calls += 1
            waiting = []
            for each in gc.get_objects():
                if issubclass(type(each), torch.optim.Optimizer):  # proxies are not asked
                    held = {id(parameter) for parameter in parameters_of(each)}
                    if not held & self._seen:
                        waiting.append((each, held))
            mine = [each for each, held in waiting if held & own]
            if mine and not own & self._seen:
                self._seen |= own
                self._calls = 0
                _Steps(mine, self._begin(module, mine), self._fault)
            return len(waiting) > len(mine) or not self._seen or self._calls < _PATIENCE
        except Exception as error:
            self._fault(error)
            return False


class _Steps:
    """Calls a function whenever all optimizers of a model have made their step."""

    def __init__(
        self,
        optimizers: Sequence[Any],
        end: Callable[[], None],
        fault: Callable[[Exception], None],
    ) -> None:
        self._end, self._fault, self._count = end, fault, len(optimizers)
        self._made: set[int] = set()
        for each in optimizers:
            each.register_step_pre_hook(self._before)
            each.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._made:  # the others do not step every time
            self._finish()

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._made.add(id(optimizer))
        if len(self._made) == self._count:
            self._finish()

    def _finish(self) -> None:
        self._made.clear()
        try:
            self._end()
        except Exception as error:
            self._fault(error)
