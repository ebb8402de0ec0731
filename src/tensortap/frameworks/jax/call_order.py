"""Which call of its module an observed value belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tensortap.frameworks.jax.harvest import MarkedValue
from tensortap.record import Kind

T = TypeVar("T")


def without_recomputed(
    observed: Iterable[tuple[MarkedValue, T]],
) -> Iterator[tuple[MarkedValue, T]]:
    """Leave out the activations that a backward pass recomputes (`jax.checkpoint`).

    A value is recomputed if a backward pass has begun and the gradient of an earlier call is
    still to come.
    """
    backward = False
    open_calls: dict[int, int] = {}
    for value, vector in observed:
        uid = value.mark.uid
        if value.mark.kind is Kind.GRADIENT:
            backward = True
            open_calls[uid] = open_calls.get(uid, 0) - 1
        elif backward and open_calls.get(uid, 0) > 0:
            continue
        else:
            open_calls[uid] = open_calls.get(uid, 0) + 1
        yield value, vector


def in_program_order(observed: Iterable[tuple[MarkedValue, T]]) -> list[tuple[MarkedValue, T]]:
    """Sort what compiled code has called back with, because XLA calls in any order.

    The n-th callback of a mark belongs to the n-th run of its code. If all activations came
    before the gradients, the backward pass ran as its own function, from the last call to the
    first.
    """
    listed = list(observed)
    places: dict[tuple[int, Kind], list[int]] = {}
    for index, (value, _) in enumerate(listed):
        places.setdefault((value.mark.uid, value.mark.kind), []).append(index)
    keys: dict[int, tuple[int, int, bool]] = {}
    for (uid, kind), indices in places.items():
        activations = places.get((uid, Kind.ACTIVATION), [])
        is_gradient = kind is Kind.GRADIENT
        backwards = is_gradient and bool(activations) and max(activations) < indices[0]
        for run, index in enumerate(reversed(indices) if backwards else indices):
            keys[index] = run, uid, is_gradient
    return [listed[index] for index in sorted(keys, key=keys.__getitem__)]


def first_calls(values: Iterable[MarkedValue]) -> list[int]:
    """Return the index of the first call of each value among those of its name.

    Activations count in program order. A gradient gets the index of its activation; a backward
    pass meets the calls from the last to the first.
    """
    listed = list(values)
    first: dict[int, int] = {}
    counts: dict[tuple[str, str], int] = {}
    open_calls: dict[int, list[int]] = {}  # calls whose gradients are still to come

    def number(index: int) -> None:
        mark = listed[index].mark
        key = mark.name, mark.part
        first[index] = counts.get(key, 0)
        counts[key] = first[index] + listed[index].calls

    alone = []  # gradients without an activation
    for index, value in enumerate(listed):
        uid = value.mark.uid
        if value.mark.kind is Kind.ACTIVATION:
            number(index)
            open_calls.setdefault(uid, []).append(first[index])
        elif open_calls.get(uid):
            first[index] = open_calls[uid].pop()
        else:
            alone.append(index)
    counts.clear()
    for index in sorted(alone, key=lambda i: (listed[i].mark.uid, -i)):
        number(index)
    return [first[index] for index in range(len(listed))]
