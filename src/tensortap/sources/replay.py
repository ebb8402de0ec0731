"""`replay`: run a step of a run again, with probes that were not there the first time."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensortap import frameworks, ranks
from tensortap.errors import NotFound, TensortapError
from tensortap.files import plain
from tensortap.frameworks.operations import Operation
from tensortap.frameworks.replaying import StorableTraining
from tensortap.frameworks.snapshot import borrow, describe, local_part
from tensortap.pipeline.pipeline import pipeline
from tensortap.readers.replayable import StoredStep
from tensortap.record import Kind, Record
from tensortap.runs.layout import write_json
from tensortap.sources.init import finish, open_run, opened
from tensortap.sources.ops import OperationRecorder
from tensortap.sources.replay_plan import PlannedStep, plan
from tensortap.sources.replay_request import ReplayRequest, answer_file
from tensortap.sources.trace import Tracer
from tensortap.sources.tracing.collect import TraceOptions

_GRADIENT = ":gradient"


class Replay(NamedTuple):
    """The values of a step that was run again.

    `values` has a list for each path that was asked for, in the order in which they were bound.
    `same` says whether the digests of all results equal those of the first time, and `text` says
    it in words: which steps were run, what was compared, and what differs first.
    """

    step: int
    snapshot: int
    replayed: int
    same: bool
    values: dict[str, list[Any]]
    text: str

    def __str__(self) -> str:
        return self.text


class ReplayedProbes:
    """Probes for paths of three kinds: traced values, gradients, and operations.

    ``blocks.0.forward.x`` is a path of `tap.trace`, also from the name of the step function on;
    ``blocks.0:gradient`` the gradient of a module's output or of a parameter; and
    ``blocks.0:3:softmax`` an operation, as `tap.ops` names it.
    """

    def __init__(
        self, step: Callable[..., Any], model: Any, training: StorableTraining, paths: Sequence[str]
    ) -> None:
        self._model = model
        self._training = training
        self._gradients = [p.removesuffix(_GRADIENT) for p in paths if p.endswith(_GRADIENT)]
        others = [p for p in paths if not p.endswith(_GRADIENT)]
        self._operations = [p for p in others if ":" in p]
        traced = [p for p in others if ":" not in p]
        name = f"{getattr(step, '__name__', '')}."
        own = [p for p in traced if p.startswith(name) and not hasattr(model, name[:-1])]
        options = TraceOptions(changed=False).checked()
        of_model = [p for p in traced if p not in own]
        self._tracers = [Tracer(model, of_model, options, always=True)] if of_model else []
        self._of_step = Tracer(step, [p.removeprefix(name) for p in own], options, always=True)
        self._step_name = name if own else ""
        self.values: dict[str, list[Any]] = {}

    @contextlib.contextmanager
    def attached(self, step: int) -> Iterator[None]:
        """Observe the step that is run inside."""
        with contextlib.ExitStack() as hooks:
            for tracer in self._tracers:
                hooks.enter_context(tracer)
            if self._step_name:
                hooks.enter_context(self._of_step)
            if self._gradients:
                take = self._training.observe_gradients(
                    self._gradients, lambda name, value: self._add(name + _GRADIENT, value)
                )
                hooks.enter_context(take)
            if self._operations:
                recorder = _OutputRecorder(self._model, step, self._operations, self._add)
                recorder.attach()
                hooks.callback(recorder.close)
            yield
        for tracer in self._tracers:
            for path, traced in tracer.results.items():
                self.values.setdefault(path, []).extend(traced.values)
        if self._step_name:
            for path, traced in self._of_step.results.items():
                self.values.setdefault(self._step_name + path, []).extend(traced.values)

    def _add(self, name: str, value: Any) -> None:
        self.values.setdefault(name, []).append(value)


class _OutputRecorder(OperationRecorder):
    """Keeps the outputs of operations whose names match."""

    def __init__(
        self, model: Any, step: int, patterns: Sequence[str], take: Callable[[str, Any], None]
    ) -> None:
        super().__init__(model, lambda record: None, lambda: step, always=True)
        self._patterns = patterns
        self._take = take

    def operation(self, operation: Operation) -> None:
        for each in operation.outputs:
            name = operation.place + each.path
            if any(name == one or fnmatch.fnmatchcase(name, one) for one in self._patterns):
                array = each.array()
                if array is not None:
                    self._take(name, array.copy())


class _Proof:
    """Compares the digests of results with those of the first time."""

    def __init__(self) -> None:
        self.compared: list[int] = []
        self.differs: int | None = None

    def check(self, step: StoredStep, result: bytes) -> None:
        if step.result and result:
            self.compared.append(step.number)
            if step.result != result and self.differs is None:
                self.differs = step.number

    def words(self, training: StorableTraining, step: int) -> tuple[bool, str]:
        """Return whether it is the same step on all ranks, and how that is known."""
        found = [json.loads(text) for text in training.gather(json.dumps(self._own_words(step)))]
        for rank, (same, words) in enumerate(found):
            if not same:
                return False, f"on rank {rank}, {words}" if len(found) > 1 else words
        _, words = found[training.rank if len(found) > 1 else 0]
        return True, f"{words}, on each of {len(found)} ranks" if len(found) > 1 else words

    def _own_words(self, step: int) -> tuple[bool, str]:
        if self.differs is not None:
            return False, (
                f"this is not the same step: the digest of the result of step {self.differs} is "
                "the first that differs; the program, its packages, the machine, or state outside "
                "of model and optimizer have changed"
            )
        if step not in self.compared:
            return False, (
                "nothing proves that this is the same step: the run has no digest of its result"
            )
        results = "result has the digest" if len(self.compared) == 1 else "results have the digests"
        count = len(self.compared)
        return True, f"this is the same step: {count} {results} stored in the run"


def replay(box: Any, run: Path, step: int, paths: Sequence[str]) -> Replay:
    """Run a step of a run again with the step function of a `BlackBox`, and put everything back.

    In a distributed job every rank has to call this.
    """
    own = opened()
    if own is not None and own.box is not None and own.path == run:
        own.box.flush(60.0)
    training = box.training
    if not isinstance(training, StorableTraining):
        raise TensortapError("steps of JAX programs cannot be replayed from a run")
    snapshot, planned = plan(run, training, step)
    probes = ReplayedProbes(box.step_function, box.model, training, paths)
    proof = _Proof()
    with box.rewound():
        with _fitting(snapshot.head.step):
            training.restore(training.state_from(frameworks.rebuild(snapshot.snapshot())))
        for each in planned:
            _run_again(box.step_function, training, each, step, probes, proof)
    _check_found(training, probes.values, paths, step)
    same, words = proof.words(training, step)
    steps = "1 step" if len(planned) == 1 else f"{len(planned)} steps"
    text = f"step {step}, from the snapshot before step {snapshot.head.step}, {steps}: {words}"
    return Replay(step, snapshot.head.step, len(planned), same, probes.values, text)


@contextlib.contextmanager
def _fitting(step: int) -> Iterator[None]:
    """Say that what is stored of a step is not of this program, whatever error shows it."""
    try:
        yield
    except TensortapError:
        raise
    except (
        ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError,
    ) as error:  # fmt: skip
        said = plain(str(error), 200)
        raise TensortapError(f"step {step} of the run does not fit this program: {said}") from None


def _run_again(
    function: Callable[..., Any],
    training: StorableTraining,
    planned: PlannedStep,
    step: int,
    probes: ReplayedProbes,
    proof: _Proof,
) -> None:
    """Run one step, with probes if it is the one that was asked for."""
    segment, stored = planned
    with _fitting(stored.number):
        batch, moment = training.step_from(frameworks.rebuild(segment.value(stored)))
        training.restore_moment(moment)
        args, kwargs = training.batch_of(batch)
    with probes.attached(step) if stored.number == step else contextlib.nullcontext():
        result = function(*args, **kwargs)
    proof.check(stored, training.digest_of(result))


def _check_found(
    training: StorableTraining, values: Mapping[str, list[Any]], paths: Sequence[str], step: int
) -> None:
    """Raise NotFound if a path without wildcards has no value on any rank, or nothing has."""
    seen = [name for name, found in values.items() if found]
    missing = []
    for path in paths:
        base = path.removesuffix(_GRADIENT)
        found = any(one == path or one.startswith((f"{base}.", f"{base}[")) for one in seen)
        if not seen or not ("*" in path or found):
            missing.append(path)
    everywhere = set.intersection(*map(set, map(json.loads, training.gather(json.dumps(missing)))))
    for path in missing:
        if path in everywhere:
            raise NotFound(f"no value of {path!r} in step {step}")


# -- in the program that `tensortap replay` starts ------------------------------------------------


def answer(box: Any, request: ReplayRequest) -> None:
    """Replay what was asked for, write the answer as a run, and end the process."""
    training = box.training
    status = 0
    try:
        found = replay(box, request.run, request.step, request.paths)
        path = _write(found, request.out)
        training.gather("")  # rank 0 tells the others which folder it is, until here
        content = {
            "text": found.text, "same": found.same, "snapshot": found.snapshot,
            "replayed": found.replayed, "run": str(path),
        }  # fmt: skip
    except TensortapError as error:
        content, status = {"error": str(error)}, 2
    except Exception as error:  # of the program
        traceback.print_exc()
        content, status = {"error": f"the step raised {type(error).__name__}: {error}"}, 2
    write_json(answer_file(request.folder, training.rank), content)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # neither `finally` nor `atexit` of the program: it has not trained


def _write(found: Replay, folder: Path) -> Path:
    """Write the values as a run of its own, which all ranks share."""
    path = open_run(folder)
    tags = {"replayed": "the same step" if found.same else "not the same step"}
    rank, world_size = ranks.rank_and_world_size()
    pipeline.switch(True)
    for name, values in found.values.items():
        kind = Kind.LOCAL
        if name.endswith(_GRADIENT):
            kind = Kind.GRADIENT
        elif ":" in name:
            kind = Kind.OP
        for call, value in enumerate(values):
            local, shard = local_part(value)
            class_name, dtype, shape = describe(local)
            pipeline.put(Record(
                name, kind, found.step, call, pipeline.next_seq(), rank, world_size,
                time.time_ns(), class_name, dtype, shape, shard, None, borrow(local), None, tags,
            ))  # fmt: skip
    finish()
    return path
