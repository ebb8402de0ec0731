"""From what people write to what a table holds: kinds, layers, statistics, steps, ranks.

What is not there is said with what is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tensortap.errors import NotFound
from tensortap.record import Kind
from tensortap.table.logframe_schema import tensor_type
from tensortap.table.table import Table, no_such

_PARAMETERS = (Kind.WEIGHT.value, Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value)
Layers = str | re.Pattern[str] | Iterable[str] | None


class Chosen(NamedTuple):
    """A kind, and the names of it that are meant."""

    kind: str
    names: list[str]


def choose_kind(table: Table, tt: Kind | str | None) -> tuple[str, str]:
    """The kind that a text means, and the key of an optimiser's state or nothing.

    ``"Act"`` is Activation, ``"weights"`` is Weight, ``"Optimizer_State.exp_avg"`` is that state.
    """
    there = table.tensor_kinds()
    if not there:
        raise NotFound("nothing here has statistics: tap.track() takes them")
    if tt is None:
        return there[0], ""
    wanted = tt.value if isinstance(tt, Kind) else str(tt)
    head, _, key = wanted.partition(".")
    meant = tensor_type(head) or _by_prefix(head, there)
    if meant is None:
        raise NotFound(no_such("kind", wanted, there))
    if meant not in there:
        raise NotFound(f"no {meant} here; there is {_and(there)}")
    return meant, key


def _by_prefix(head: str, there: Sequence[str]) -> str | None:
    small = head.strip().lower().replace(" ", "_").replace("optimizer", "optimiser")
    found = [kind for kind in there if small and kind.lower().startswith(small)]
    if len(found) > 1:
        raise NotFound(f"{head!r} may be {' or '.join(found)}")
    return found[0] if found else None


def choose_layers(table: Table, kind: str, layer: Layers, key: str = "") -> list[str]:
    """The names of a kind that are meant: all, those that a pattern finds, or the given ones.

    A parameter may be called by its module: ``"fc"`` is ``fc.weight``.
    """
    there = table.layers(kind)
    if key:
        there = [name for name in there if name.endswith(f".{key}")]
        if not there:
            keys = {name.rpartition(".")[2] for name in table.layers(kind)}
            raise NotFound(no_such("state", key, sorted(keys)))
    if layer is None:
        return there
    if isinstance(layer, re.Pattern):
        found = [name for name in there if layer.search(name)]
        if not found:
            raise NotFound(f"no {kind} has a name that {layer.pattern!r} finds")
        return found
    wanted = [layer] if isinstance(layer, str) else list(layer)
    known = set(there)
    return list(dict.fromkeys(n for each in wanted for n in _one(each, kind, there, known, key)))


def _one(wanted: str, kind: str, there: list[str], known: set[str], key: str) -> list[str]:
    if wanted in known:
        return [wanted]
    if kind in _PARAMETERS:
        for name in (f"{wanted}.weight", f"{wanted}.{key}", f"{wanted}.weight.{key}"):
            if name in known:
                return [name]
        states = [name for name in there if name.startswith((f"{wanted}.weight.", f"{wanted}."))]
        if states and kind == Kind.OPTIMISER_STATE.value:
            return [name for name in states if name.startswith(f"{wanted}.weight.")] or states
    raise NotFound(no_such(f"{kind} layer", wanted, there))


def choose_metrics(table: Table, metric: str | Iterable[str]) -> list[str]:
    """Statistics that there are."""
    wanted = [metric] if isinstance(metric, str) else list(metric)
    there = table.statistics()
    for each in wanted:
        if each not in there:
            raise NotFound(no_such("statistic", each, there))
    if not wanted:
        raise ValueError(f"which statistic? there is {', '.join(there)}")
    return wanted


def check_statistics(table: Table, kind: str, names: Sequence[str]) -> None:
    """NotFound where tensors were caught without their statistics, with how to get them."""
    if not table.has("count"):
        return  # a frame has what it has
    rows = table.rows(kind=kind, names=names)
    if len(rows) and np.isnan(table.column("count")[rows]).all():
        raise NotFound(
            f"{names[0]!r} ({kind}) was captured without statistics: tap.track() takes them, and "
            "run.logframe() works them out of the tensors, for viz to draw from"
        )


def choose_step(table: Table, kind: str, names: Sequence[str], step: int | None) -> int:
    """The step that is asked for, or the last; its neighbours are said if it is not there."""
    steps = np.unique(table.step[table.rows(kind=kind, names=names)])
    if not len(steps):
        raise NotFound(f"no {kind} of {', '.join(names[:3])}")
    if step is None:
        return int(steps[-1])
    place = int(np.searchsorted(steps, step))
    if place < len(steps) and steps[place] == step:
        return int(step)
    near = [str(n) for n in steps[max(0, place - 1) : place + 1].tolist()]
    word = "step is" if len(near) == 1 else "steps are"
    raise NotFound(
        f"no {kind} of {names[0]!r} at step {step}; the nearest captured {word} {_and(near)}"
    )


def choose_rank(table: Table, rank: int | None) -> int | None:
    """A rank that there is, or None for all."""
    if rank is not None and rank not in table.ranks():
        raise NotFound(f"no rank {rank}; there is {_and([str(r) for r in table.ranks()])}")
    return rank


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
