"""`graft`: outputs of modules replaced by those that another run recorded."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tensortap.capture.pipeline import pipeline
from tensortap.core.arguments import checked
from tensortap.core.errors import NotFound, TensortapError
from tensortap.core.patterns import compile_pattern
from tensortap.core.record import Kind, TensorData
from tensortap.rooms.bisect.grafting import GraftSource, Swap, grafting
from tensortap.rooms.bisect.recorded_step import RecordedStep
from tensortap.rooms.compare.compared_run import ComparedRun
from tensortap.rooms.compare.matching import parse_mapping
from tensortap.runs.reader import similar_names

if TYPE_CHECKING:
    from tensortap.rooms.bisect.torch.grafts import ModelGrafts

log = logging.getLogger("tensortap")
Names = str | re.Pattern[str] | Iterable[str]


class Graft(GraftSource):
    """Recorded outputs in place of computed ones; made by `graft`, used in a ``with`` statement."""

    judges = False

    def __init__(
        self, model: Any, run: Any, names: Names, step: int | None, mapping: Iterable[Any]
    ) -> None:
        self._run = ComparedRun(run)
        self._fixed = step
        self._renames = [parse_mapping(each) if isinstance(each, str) else each for each in mapping]
        super().__init__(self._at(step if step is not None else pipeline.clock.step))
        self.notes: dict[str, str] = {}
        """Changes that recorded values needed, by name, such as a cast."""
        self.replaced: dict[str, int] = {}
        """Number of replaced outputs by name."""
        self._hooks: ModelGrafts | None = grafting(model, self)
        self._modules = self._select(self._hooks.modules, names)

    def _at(self, step: int | None) -> RecordedStep:
        return RecordedStep(self._run, step, self._renames)

    def _select(self, modules: list[str], names: Names) -> set[str]:
        """Return the modules that fit the patterns; raise if a pattern selects none."""
        found: set[str] = set()
        for each in [names] if isinstance(names, (str, re.Pattern)) else list(names):
            pattern = compile_pattern(each, "names")
            fitting = [name for name in modules if pattern.search(name)]
            chosen = [name for name in fitting if self._recorded.calls(name)]
            if not fitting:
                near = similar_names(pattern.pattern, modules)
                raise NotFound(f"the model has no module {pattern.pattern!r}; {near}")
            if not chosen or (pattern.pattern in fitting and pattern.pattern not in chosen):
                name = pattern.pattern if pattern.pattern in fitting else fitting[0]
                self._recorded.get(name, Kind.ACTIVATION)  # which says why not
            found.update(chosen)
        return found

    def __enter__(self) -> Graft:
        if self._hooks is None:
            raise RuntimeError("this graft has ended: call tap.rooms.bisect.graft(...) again")
        try:
            self._hooks.attach()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.detach()

    # -- for hooks -------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """The step of the program, whose outputs of the run take the place of computed ones."""
        step = pipeline.clock.step
        if self._fixed is None and step is not None and step != self._recorded.step:
            self._recorded = self._at(step)
        return self._recorded.step if step is None else step

    def selects(self, module: str) -> bool:
        """Return whether the outputs of a module are replaced."""
        return module in self._modules

    def recorded(
        self, name: str, kind: Kind, call: int, shape: tuple[int, ...]
    ) -> TensorData | None:
        """Return the recorded output; raise NotFound if the run has none."""
        found = self._recorded.get(name, kind, call, shape)
        if found.note:
            self._note(name, found.note)
        return found.data

    def swap(self, swap: Swap) -> None:
        """Check the shapes, and note a cast."""
        ours, theirs = tuple(swap.computed.shape), tuple(swap.recorded.shape)
        if ours != theirs:
            raise TensortapError(
                f"{swap.name}: its output has shape {list(ours)}, the recorded one {list(theirs)}; "
                "run both programs with the same batch"
            )
        dtypes = [str(each.dtype).removeprefix("torch.") for each in (swap.recorded, swap.computed)]
        if dtypes[0] != dtypes[1]:
            self._note(swap.name, f"recorded as {dtypes[0]}, cast to {dtypes[1]}")
        self.replaced[swap.name] = self.replaced.get(swap.name, 0) + 1

    def _note(self, name: str, note: str) -> None:
        known = self.notes.get(name, "")
        if note in known:
            return
        if not any(note in each for each in self.notes.values()):
            log.warning("tensortap: graft: %s: %s", name, note)
        self.notes[name] = f"{known}; {note}" if known else note


@checked
def graft(
    model: Any,
    run: Any,
    names: str | re.Pattern[str] | Iterable[str],
    *,
    step: int | None = None,
    mapping: Iterable[str | tuple[str, str]] = (),
) -> Graft:
    r"""Replace outputs of modules by recorded ones: ``with graft(model, "runs/a", "attn"):``.

    `names` are regular expressions over the names of modules; the `run` must have their outputs
    (``tap.track(..., tensors=True)``). It may come from another layout: shards are put together.
    `step` is the recorded step, by default that of the program, or the first of the run.
    The n-th call of a module in a step gets the n-th recorded output. Gradients flow as if the
    module had computed the value. `mapping` renames modules to the names of the run:
    ``[r"h\.(\d+)=blocks.\1"]``. Leaving the ``with`` statement removes everything.

    >>> import tempfile, torch, tensortap as tap
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.ones(1, 2)
    >>> with tap.track(model, tensors=True, to=tempfile.mkdtemp()) as tracker:
    ...     recorded = model(x)
    ...     tracker.step()
    >>> with torch.no_grad():
    ...     _ = model[0].weight.zero_()
    >>> with graft(model, tracker.path, "1"):
    ...     bool((model(x) == recorded).all())
    True
    """
    return Graft(model, run, names, step, mapping)
