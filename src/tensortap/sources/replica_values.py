"""Ask two ranks for a tensor in which several elements differ, through the store that they share.

Digests tell which element differs if it is the only one. If there are more, the rank that votes
asks one rank of each side. Both answer at their next checks, and the values of the first step that
both have sent are compared.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tensortap import frameworks as arrays
from tensortap.alerts import Alert
from tensortap.alerts.vote import ReplicaLayout, UnequalTensor
from tensortap.buffers import view_of
from tensortap.dtypes import itemsize
from tensortap.frameworks.observing import RankStore
from tensortap.pipeline.pipeline import pipeline
from tensortap.record import Kind, TensorData

_LARGEST = 64 << 20  # bytes that are sent
_MOST_BYTES = 256 << 20  # of all answers of a rank to a question
_ANSWERS = 32  # checks at which a rank sends the tensor: threads of ranks may be steps apart


class WantedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A question to a rank."""

    number: str
    kind: Kind
    name: str


_decode = msgspec.msgpack.Decoder(WantedTensor).decode


class ReplicaAnswers:
    """Sends the tensor that another rank has asked for; `wanted` is None if nobody has."""

    def __init__(self, store: RankStore) -> None:
        self.wanted: WantedTensor | None = None
        self._store = store
        self._left = 0
        self._number = ""

    def look(self) -> None:
        """Look for a question; one that has been withdrawn needs no more answers."""
        found = self._store.get([f"ask/{self._store.rank}"])
        if found is None:
            self.wanted = None
        elif (wanted := _decode(found[0])).number != self._number:
            self.wanted, self._number, self._left = wanted, wanted.number, _MOST_BYTES

    def send(self, step: int, copied: TensorData) -> None:
        """Send the tensor as it was in a step."""
        data = bytes(view_of(copied.data))
        self._store.put(f"values/{self._number}/{step}/{self._store.rank}", data)
        self._left -= max(len(data), _MOST_BYTES // _ANSWERS)
        if self._left <= 0:
            self.wanted = None


def copy_of(value: Any) -> TensorData | None:
    """Return a copy of a tensor; None if it is too large to be sent."""
    if arrays.nbytes_of(value) > _LARGEST:
        return None
    copied, _ = arrays.snapshot(value, pipeline.pool)
    return copied if isinstance(copied, TensorData) else None


class _Question(NamedTuple):
    number: str
    unequal: UnequalTensor
    steps: list[int]  # at which it may be answered


class ReplicaQuestions:
    """Asks for one tensor at a time, and compares the answers."""

    def __init__(self, store: RankStore) -> None:
        self._store = store
        self._question: _Question | None = None
        self._count = 0

    @property
    def is_waiting(self) -> bool:
        """Whether answers may come at a step that this rank has reached."""
        return self._question is not None and bool(self._question.steps)

    def ask(self, unequal: UnequalTensor) -> None:
        """Ask a rank of each side, unless another question is open."""
        if self._question is None:
            self._count += 1
            number = f"{self._store.rank}.{self._count}"
            layout = unequal.layout
            for rank in (unequal.right, unequal.wrong):
                wanted = WantedTensor(number, layout.kind, layout.name)
                self._store.put(f"ask/{rank}", msgspec.msgpack.encode(wanted))
            self._question = _Question(number, unequal, [])

    def reach(self, step: int) -> None:
        """Expect answers at another step; after several without, forget the question."""
        if self._question is not None:
            self._question.steps.append(step)
            if len(self._question.steps) > 2 * _ANSWERS:
                self._close(self._question)

    def receive(self) -> Alert | None:
        """Return what two ranks differ in, once both have answered."""
        question = self._question
        if question is None:
            return None
        for step in question.steps:
            found = self._store.get(self._keys(question, step))
            if found is not None:
                self._close(question)
                return _difference(question.unequal, step, *found)
        return None

    def _keys(self, question: _Question, step: int) -> list[str]:
        ranks = question.unequal.right, question.unequal.wrong
        return [f"values/{question.number}/{step}/{rank}" for rank in ranks]

    def _close(self, question: _Question) -> None:
        self._question = None
        for rank in (question.unequal.right, question.unequal.wrong):
            self._store.delete(f"ask/{rank}")
        for step in question.steps:
            for key in self._keys(question, step):
                self._store.delete(key)


def _difference(unequal: UnequalTensor, step: int, right: bytes, wrong: bytes) -> Alert | None:
    """Return how many elements differ, and the first of them."""
    layout = unequal.layout
    size, count = itemsize(layout.dtype), math.prod(layout.shape)
    if not len(right) == len(wrong) == size * count:
        return None
    one, other = (np.frombuffer(data, np.uint8).reshape(count, size) for data in (right, wrong))
    differing = np.flatnonzero((one != other).any(axis=1))
    if not len(differing):
        return None
    at, element = _place(layout, int(differing[0]))
    verb = "element differs" if len(differing) == 1 else "elements differ"
    message = (
        f"{len(differing):,} of {count:,} {verb} between rank {unequal.right} and rank "
        f"{unequal.wrong} at step {step:,}, the first is {list(at)}"
    )
    facts = {"differing": float(len(differing)), "element": float(element)}
    return Alert(
        "replicas", layout.name, layout.kind, step, unequal.wrong, layout.module, message,
        layout.module, facts=facts,
    )  # fmt: skip


def _place(layout: ReplicaLayout, position: int) -> tuple[tuple[int, ...], int]:
    """Return the indices of an element in the whole tensor, and its position there."""
    local = np.unravel_index(position, layout.shape)
    whole, offsets = layout.shape, (0,) * len(layout.shape)
    if layout.shard is not None:
        whole, offsets = layout.shard.global_shape, layout.shard.offsets
    at = tuple(int(i) + start for i, start in zip(local, offsets, strict=True))
    return at, int(np.ravel_multi_index(at, whole))
