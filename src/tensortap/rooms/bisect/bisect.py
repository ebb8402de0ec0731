"""`bisect`: find every module that does not compute what a reference computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tensortap.capture.pipeline import pipeline
from tensortap.core import ranks
from tensortap.core.arguments import checked
from tensortap.core.errors import NotFound, TensortapError
from tensortap.rooms.bisect.faulty_modules import BisectReport
from tensortap.rooms.bisect.grafting import GraftSource, grafting
from tensortap.rooms.bisect.judge import Judge
from tensortap.rooms.bisect.recorded_step import RecordedStep
from tensortap.rooms.compare.compared_run import ComparedRun
from tensortap.rooms.compare.matching import parse_mapping
from tensortap.rooms.compare.tensors import Tolerance, check_tolerance
from tensortap.values.registry import parts

if TYPE_CHECKING:
    from tensortap.rooms.blackbox.torch import Kept, TorchTraining


class BisectOptions(NamedTuple):
    """Selection and tolerances of a comparison."""

    run: Any
    step: int | None = None
    mapping: tuple[Any, ...] = ()
    atol: float | None = None
    rtol: float | None = None

    def check(self) -> list[tuple[str, str]]:
        """Return the mapping as patterns and replacements; raise if an option has a wrong value."""
        check_tolerance(self.atol, self.rtol)
        return [parse_mapping(each) if isinstance(each, str) else each for each in self.mapping]


class Bisection:
    """Judges one step of a model by a run; entered just before the step."""

    def __init__(self, model: Any, options: BisectOptions) -> None:
        renames, run = options.check(), ComparedRun(options.run)
        recorded = RecordedStep(run, options.step, renames)
        own, there = ranks.rank_and_world_size()[1], recorded.world_size
        if there not in (1, own):
            raise TensortapError(
                f"{run.title} is of {there} ranks, this program of {own}: the reference must have "
                "as many, or be of one process"
            )
        self.step, self.reference = recorded.step, run.title
        self._before: GraftSource | None = None
        # a run of each n-th step has none: then the program has its own weights
        with contextlib.suppress(NotFound):
            self._before = GraftSource(RecordedStep(run, self.step - 1, renames))
        tolerance = Tolerance(threads=1).given(options.atol, options.rtol)
        self.judge = Judge(recorded, tolerance, self._before)
        self.hooks = grafting(model, self.judge)

    def begin(self) -> None:
        """Start from the recorded weights, if there are any from before the step."""
        self.hooks.attach()
        if self._before is not None:
            self.hooks.load(self._before)
        self.hooks.begin()

    def raised(self, error: BaseException) -> bool:
        """Note the module that an error came from; return whether it came from one."""
        module = self.hooks.running
        if isinstance(error, TensortapError) or not module:
            return False
        first = (str(error).splitlines() or [""])[0]
        self.judge.raised(module, f"raised {type(error).__name__}: {first}")
        return True

    def end(self) -> None:
        """Remove everything."""
        self.hooks.detach()

    def report(self) -> BisectReport:
        """Return what was found."""
        return self.judge.report(self.reference)


@checked
def bisect(
    step_fn: Callable[[], Any],
    model: Any,
    run: Any,
    *,
    step: int | None = None,
    mapping: Iterable[str | tuple[str, str]] = (),
    atol: float | None = None,
    rtol: float | None = None,
) -> BisectReport:
    """Find all modules that do not compute what the reference computes from its inputs.

    `step_fn` runs one training step, with the batch of the reference: forward, and if you like
    backward and optimizer. It is called once. Meanwhile the tensors of `run` take the place of
    those computed, so that each module is judged on its own and one bug does not hide another.
    Record the reference with ``tap.track(model, optimizer, tensors=True, kind="all")``.

    `step` is the recorded step, by default the first; before a later one, the model gets the
    recorded weights and optimizer state of the step before. `mapping`, `atol` and `rtol` are those
    of `tap.compare`. Afterwards the model, its optimizers and the random states are as before.

    >>> import tempfile, torch, tensortap as tap
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.ones(1, 2)
    >>> with tap.track(model, tensors=True, kind="all", to=tempfile.mkdtemp()) as tracker:
    ...     model(x).sum().backward()
    ...     tracker.step()
    >>> model[1] = torch.nn.ReLU()
    >>> tap.bisect(lambda: model(x).sum().backward(), model, tracker.path).modules
    ('1',)
    """
    bisection = Bisection(model, BisectOptions(run, step, tuple(mapping), atol, rtol))
    kept = _KeptProgram(model)
    enabled = pipeline.enabled
    pipeline.switch(False)  # nobody records what is executed with values of another run
    try:
        bisection.hooks.stepping = kept.keep_optimizer
        bisection.begin()
        try:
            step_fn()
            bisection.hooks.end_step()
        except Exception as error:
            if not bisection.raised(error):
                raise
    finally:
        bisection.end()
        kept.restore()
        pipeline.switch(enabled)
    return bisection.report()


class _KeptProgram:
    """The state of a model and of the optimizers that make a step meanwhile."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: list[tuple[TorchTraining, Kept]] = []
        self.keep_optimizer(None)

    def keep_optimizer(self, optimizer: Any) -> None:
        """Keep the state of the model and of an optimizer, just before its step."""
        for part in parts("tensortap.rooms.blackbox"):
            training = part.training(self._model, optimizer, ())
            if training is not None:
                self._kept.append((training, training.keep_present()))

    def restore(self) -> None:
        """Put everything back; the first copy is the one from before the step."""
        while self._kept:
            training, kept = self._kept.pop()
            training.restore(kept)
