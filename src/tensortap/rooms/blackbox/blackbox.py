"""`blackbox`: keep what is needed to run recent steps again, and say why one went wrong."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from tensortap.alerts.alert import WHY, Alert, record_of
from tensortap.alerts.monitor import listeners
from tensortap.capture.pipeline import pipeline
from tensortap.core.arguments import check_callable, check_count
from tensortap.core.errors import TensortapError
from tensortap.core.limits import format_size
from tensortap.core.record import Kind, Record
from tensortap.rooms.blackbox.explaining import Explainer, KeptStep, Verdict
from tensortap.rooms.track.observer import is_tracking
from tensortap.values.registry import parts

if TYPE_CHECKING:
    from tensortap.rooms.blackbox.torch import Kept, TorchTraining

log = logging.getLogger("tensortap")


class _Disabled(Exception):
    """Capturing is off on this rank."""


class BlackBox:
    """A step function whose recent calls can be run again; made by `blackbox`."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: Any,
        training: TorchTraining,
        every: int,
        memory: int,
        explain: bool,
    ) -> None:
        self._step = step
        self._model = model
        self._training = training
        self._every = every
        self._memory = memory
        self._explains = explain
        self._snapshot: Kept | None = None
        self._steps: list[KeptStep] = []
        self._spare: KeptStep | None = None  # a good step before the snapshot
        self._count = 0
        self._alerted = self._explained = self._replaying = self._interrupted = False
        self.verdicts: list[Verdict] = []
        listeners.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; keep what is needed to run it again."""
        if self._replaying:
            return self._step(*args, **kwargs)
        if not pipeline.enabled and self._training.world_size == 1:
            self._forget()
            return self._step(*args, **kwargs)
        self._guarded(self._before, (args, kwargs))
        try:
            result = self._step(*args, **kwargs)
        except BaseException as error:
            self._interrupted = True
            if self._steps and isinstance(error, Exception):
                self._steps[-1].raised = type(error).__name__
            raise
        self._guarded(self._after, result)
        return result

    def _forget(self) -> None:
        """Begin with another snapshot: a step was not kept."""
        self._snapshot, self._steps = None, []

    def _guarded(self, part: Callable[[Any], None], given: Any) -> None:
        try:
            part(given)
        except _Disabled:
            pass
        except Exception as error:
            self._forget()
            pipeline.fault("blackbox", error, "was interrupted")

    def notify(self, alert: Alert) -> None:
        """Explain the last step when the next one begins; alerts about NaN and Inf call this."""
        if alert.rule in ("nan", "inf") and not self._replaying:
            self._alerted = True

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the box holds now: one copy of the state, and batches."""
        state = 0 if self._snapshot is None else self._snapshot.nbytes
        return state + self._held(with_spare=True)

    def _held(self, with_spare: bool) -> int:
        spare = [self._spare] if with_spare and self._spare is not None else []
        return sum(each.batch.nbytes for each in (*self._steps, *spare))

    @property
    def verdict(self) -> Verdict | None:
        return self.verdicts[-1] if self.verdicts else None

    # -- keeping --------------------------------------------------------------------------------

    def _before(self, batch: Any) -> None:
        kept: Kept | Exception = self._keep_batch(batch)
        nbytes = 0 if isinstance(kept, Exception) else kept.nbytes
        restart = self._snapshot is None or self._interrupted
        full = self._held(with_spare=True) + nbytes > self._memory
        # ranks replay together: all of them begin with the same step
        alerted, restart, full = self._training.agree(
            self._alerted and self._explains and not self._explained,
            restart or isinstance(kept, Exception),
            full,
        )
        self._alerted = self._interrupted = False
        if alerted:
            self._explained = True
            self._explained = self._explain_steps(alerted=True) is not None
        if restart:
            self._forget()
        if isinstance(kept, Exception):
            raise kept
        # a state that is broken already must not replace the one from before
        due = len(self._steps) >= self._every and not self._steps[-1].bad
        counts = pipeline.clock.owner is not None or is_tracking()  # not a tracker that has ended
        number = pipeline.clock.step if counts and pipeline.clock.step is not None else self._count
        if restart or due or full:
            self._take_snapshot(nbytes)
        self._steps.append(KeptStep(number, kept, self._training.keep_moment()))
        self._count += 1

    def _keep_batch(self, batch: Any) -> Kept | Exception:
        """Copy the arguments of a step; return why that is not possible if it is not."""
        if not pipeline.enabled:
            return _Disabled()
        try:
            kept = self._training.keep_batch(batch)
        except Exception as error:
            return error
        if kept.nbytes > self._memory:
            size = format_size(kept.nbytes)
            return ValueError(f"a batch has {size}, more than memory={self._memory:,} bytes")
        return kept

    def _take_snapshot(self, nbytes: int) -> None:
        """Copy the state, and make room for the next batch."""
        good = [each for each in self._steps if not each.bad]
        self._spare = good[-1] if good else self._spare
        if self._spare is not None and self._spare.batch.nbytes + nbytes > self._memory:
            self._spare = None
        self._snapshot, self._steps = self._training.keep_state(self._snapshot), []

    def _after(self, result: Any) -> None:
        last = self._steps[-1] if self._steps else None  # None: it could not be kept
        bad = False
        try:
            if last is not None:
                last.digest = self._training.digest_of(result)
                bad = self._training.is_bad(result, whole=False)
        finally:  # other ranks wait for this one, whatever happens here
            bad, explains = self._training.agree(
                bad, bad and self._explains and not self._explained
            )
        if last is not None:
            last.bad = bad
        self._explained = bad
        if explains:
            self.explain()

    # -- explaining -----------------------------------------------------------------------------

    def explain(self) -> Verdict | None:
        """Run the last steps again and say what went wrong; then put the state of training back.

        In a distributed job all ranks have to call this. Returns None if no step was kept.
        """
        return self._explain_steps(alerted=False)

    def _explain_steps(self, alerted: bool) -> Verdict | None:
        (missing,) = self._training.agree(self._snapshot is None or not self._steps)
        if missing or self._snapshot is None:
            return None
        self._check_model(self._snapshot)
        with self._rewound():
            verdict, records = Explainer(
                self._step, self._model, self._training, self._snapshot, self._steps,
                self._spare, alerted,
            ).explain()  # fmt: skip
        self._publish(verdict, records)
        return verdict

    def _check_model(self, snapshot: Kept) -> None:
        """Raise TensortapError on all ranks if the snapshot is of another model than there is."""
        said = ""
        try:
            self._training.check(snapshot)
        except ValueError as error:
            said = str(error)
        if self._training.agree(bool(said))[0]:
            self._forget()
            why = f" ({said})" if said else ""
            raise TensortapError(
                f"the model or the optimizer has changed since the last snapshot{why}: steps "
                "before that cannot be run again"
            )

    @contextlib.contextmanager
    def _rewound(self) -> Iterator[None]:
        """Run steps inside, then restore all state, bit by bit."""
        read = iterators_of(self._step)
        if read:
            raise TensortapError(
                f"the step reads the iterator {read[0]}, which cannot be rewound: pass the batch "
                "to the step as an argument"
            )
        present, clock = self._training.keep_present(), pipeline.clock
        enabled, step, steps = pipeline.enabled, clock.step, clock.steps
        pipeline.switch(False)  # nobody tracks or catches what is run
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = False
            self._training.restore(present)
            clock.step, clock.steps = step, steps
            pipeline.switch(enabled)

    def _publish(self, verdict: Verdict, records: list[Record]) -> None:
        """Print the verdict, and put it and the operations of the step into the run."""
        self.verdicts.append(verdict)
        if self._training.rank == verdict.rank:
            log.warning("tensortap: %s", verdict.text)
        for record in records:
            pipeline.put(record)
        rank, world_size = self._training.rank, self._training.world_size
        alert = Alert(WHY, "blackbox", Kind.OP, verdict.step, rank, "", verdict.text)
        if verdict.finding is not None and rank == verdict.rank:  # where it began
            alert = verdict.finding.alert(verdict.text)
        pipeline.put(record_of(
            alert, seq=pipeline.next_seq(), time_ns=time.time_ns(), world_size=world_size
        ))  # fmt: skip


def blackbox(
    train_step: Callable[..., Any],
    model: Any,
    optimizer: Any = None,
    *others: Any,
    every: int = 50,
    memory: int = 2 << 30,
    explain: bool = True,
) -> BlackBox:
    """Return the step function with a black box: ``step = tap.blackbox(train_step, model, opt)``.

    The box keeps a copy of the state every `every` steps, and for each step since then its
    arguments and the random states, in host memory: once the bytes of parameters, buffers,
    gradients and optimizer state, and at most `memory` bytes of batches. `others` are a scheduler,
    a GradScaler, generators, and whatever else a step changes. If a result is not finite, or an
    alert about NaN fires, or you call ``step.explain()``, it runs the steps again and says whether
    the fault is deterministic, in the data or transient, in which operation, and why. Then it puts
    everything back, bit by bit. What a step does besides, such as writing to a file, happens again:
    with ``explain=False`` steps run again only if you call ``step.explain()``.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> def train_step(x):
    ...     return model(x).mean()
    >>> step = blackbox(train_step, model)
    >>> loss = step(torch.ones(4, 2))
    >>> step.explain().kind
    'finite'
    """
    check_callable("train_step", train_step)
    check_count("every", every)
    check_count("memory", memory)
    for part in parts("tensortap.rooms.blackbox"):
        training = part.training(model, optimizer, others)
        if training is not None:
            return BlackBox(train_step, model, training, every, memory, explain)
    raise TypeError(f"model must be a torch.nn.Module, got {model!r:.100}")


# -- iterators that a step reads by itself: nobody can run such a step again ----------------------


def iterators_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the iterators that a function, or one that it calls, refers to."""
    found: dict[str, None] = {}
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < 200:  # functions that are looked at
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for name, value in _referred(each):
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                waiting.append(value)
            elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                found[name] = None
    return list(found)


def _referred(function: Any) -> list[tuple[str, Any]]:
    """Return the values to which a function of the user refers, with their names."""
    if isinstance(function, functools.partial):
        return [("", function.func)]
    own: dict[str, Any] = {}
    if isinstance(function, MethodType):
        own = getattr(function.__self__, "__dict__", {})
        function = function.__func__
    if not isinstance(function, FunctionType) or _is_library(function):
        return []
    names = _names_in(function.__code__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: own[name] for name in names if name in own}
    values |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in cells:
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return list(values.items())


def _is_library(function: FunctionType) -> bool:
    package = (function.__module__ or "").partition(".")[0]
    return package in sys.stdlib_module_names or package in ("torch", "jax", "numpy", "tensortap")


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and those within it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
