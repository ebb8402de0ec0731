"""Probes: what this process can look at, and requests that change it while the program trains.

A live session sends requests. The training thread carries them out between two steps, so that all
ranks of a job change at the same step. A request is a struct of names, patterns and numbers;
nothing in it is executed.
"""

from __future__ import annotations

import collections
import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, Protocol

import msgspec

from tensortap.core.errors import StopTraining, TensortapError
from tensortap.core.patterns import TypedPattern

CHANGE = "tensortap.probe"  # name of the records of changes
MOST = 2000  # probes in one answer
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Text = Annotated[str, msgspec.Meta(max_length=1000)]


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """A name that can be looked at: a module, a parameter, a state, a catch site, a function."""

    name: str
    kind: str
    every: int = 0
    """Record each n-th step; 0 is off."""
    tensors: bool = False
    """Keep whole tensors, not only statistics."""
    seen: int = 0
    spent_ns: int = 0
    """Nanoseconds of the training thread that recording this name has taken so far."""


class ProbeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of what is looked at, from step `at` on; `steps` 0 is until the next change."""

    action: Literal["probe", "reset", "trace", "ops", "rules", "stop"] = "probe"
    pattern: _Text = ""
    """Names, as a regular expression of RE2; the path of `trace`, the names of `rules`."""
    kind: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=20)] = ()
    every: _Count = 1
    tensors: bool = False
    steps: _Count = 0
    at: _Count = 0
    recompile: bool = False
    number: _Count = 0
    """Id of the request; the records that it causes have it as a tag."""
    by: _Text = ""
    """User and host, for the record of the change."""


class ProbeAnswer(msgspec.Struct, frozen=True):
    """The answer of a program: its step, the probes that match a pattern, or why it refuses."""

    step: int = -1
    step_seconds: float = 0.0
    probes: tuple[Probe, ...] = ()
    left_out: int = 0
    refusal: str = ""


class Prober(Protocol):
    """Something with probes, such as a tracker; registered while it is active."""

    def probes(self) -> Iterable[Probe]:
        """Return the probes; another thread calls this."""
        ...

    def change(self, request: ProbeRequest, step: int) -> str:
        """Carry a request out before `step` begins; return what was done, "" if none of it is ours.

        Raise TensortapError to refuse it.
        """
        ...


class Probes:
    """The probes of this process, and the requests that wait for their step."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.waiting: list[ProbeRequest] = []
        self._probers: weakref.WeakSet[Prober] = weakref.WeakSet()
        self._begun = 0.0  # when the current step began
        self._ended: list[Probe] = []  # those of the last prober that has ended
        self._recent: collections.deque[float] = collections.deque(maxlen=20)

    def add(self, prober: Prober) -> None:
        """Register probes until `remove`, or until their owner is gone."""
        self._probers.add(prober)

    def remove(self, prober: Prober) -> None:
        """Forget probes, but not what looking at them has cost."""
        if prober in self._probers:
            self._ended = list(prober.probes())
            self._probers.discard(prober)

    def looked_at(self) -> tuple[Probe, ...]:
        """Return what was looked at, and what that has cost; of trackers, also the last one."""
        probers = [list(each.probes()) for each in list(self._probers)] or [self._ended]
        return tuple([probe for found in probers for probe in found if probe.spent_ns])

    def found(self, pattern: str = "") -> list[Probe]:
        """Return the probes whose names match a pattern that somebody typed."""
        matches = TypedPattern(pattern).search
        all_probes = [probe for prober in list(self._probers) for probe in prober.probes()]
        return [probe for probe in all_probes if len(probe.name) < 300 and matches(probe.name)]

    def receive(self, request: ProbeRequest | None, pattern: str, step: int | None) -> ProbeAnswer:
        """Take a request, in the thread of a connection, and say where the program is."""
        allowed = os.environ.get("TENSORTAP_CONTROL", "1").strip().lower()
        # the shortest of the last steps: the session has to choose a step that is still to come
        answer = ProbeAnswer(-1 if step is None else step, min(self._recent, default=0.0))
        try:
            if request is None:
                found = self.found(pattern)
                left_out = max(0, len(found) - MOST)
                return msgspec.structs.replace(
                    answer, probes=tuple(found[:MOST]), left_out=left_out
                )
            if allowed in ("0", "false", "no", "off"):
                raise TensortapError("TENSORTAP_CONTROL=0: this program is not to be changed")
            if request.action == "stop" and allowed != "stop":
                raise TensortapError("stopping needs TENSORTAP_CONTROL=stop in the program")
            if request.action not in ("trace", "rules"):
                TypedPattern(request.pattern)  # raises if it is not one
            if len(self.waiting) >= 100:
                raise TensortapError("100 requests wait for their step")
        except Exception as error:  # a request must not end the thread of the connection
            return msgspec.structs.replace(answer, refusal=str(error)[:500])
        self.waiting.append(request)
        if step is None:  # a program without steps has no better moment
            self.begin_step(None, lambda request, done: None)
        return answer

    def begin_step(self, step: int | None, done: Callable[[ProbeRequest, str], object]) -> None:
        """Carry out the requests whose step has come; `done` takes what came of each."""
        now = time.perf_counter()
        if self._begun:
            self._recent.append(now - self._begun)
        self._begun = now
        if not self.waiting:
            return
        due = [request for request in self.waiting if step is None or request.at <= step]
        for request in due:
            self.waiting.remove(request)
            if request.action == "stop":
                done(request, "training stops")
                raise StopTraining(f"{request.by} stopped the training after step {step}")
            done(request, self._change(request, step or 0))

    def _change(self, request: ProbeRequest, step: int) -> str:
        results = []
        for prober in list(self._probers):
            try:
                results.append(prober.change(request, step))
            except TensortapError as error:
                results.append(f"refused: {error}")
            except Exception as error:
                results.append(f"failed: {error!r:.200}")
        return "; ".join(filter(None, results)) or "nothing here matches"


probes = Probes()
