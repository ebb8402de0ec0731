"""Resolves what people type (kinds, layers, statistics, steps) against a table.

Errors name what is available.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from tensortap.core.errors import NotFound
from tensortap.core.record import Kind
from tensortap.runs.reader import listed, nearest_steps
from tensortap.table.columns import no_such
from tensortap.table.kinds import tensor_type
from tensortap.table.table import Table

_PARAMETERS = (Kind.WEIGHT.value, Kind.WEIGHT_GRADIENT.value, Kind.OPTIMISER_STATE.value)
Layers = str | re.Pattern[str] | Iterable[str] | None


def choose_kind(table: Table, tt: Kind | str | None) -> tuple[str, str]:
    """Return the kind that a text means, and the key of an optimizer's state or "".

    ``"Act"`` is Activation, ``"weights"`` is Weight, ``"Optimizer_State.exp_avg"`` is that state.
    """
    available = table.tensor_kinds()
    if not available:
        raise NotFound("nothing here has statistics: tap.track() takes them")
    if tt is None:
        return available[0], ""
    wanted = tt.value if isinstance(tt, Kind) else str(tt)
    head, _, key = wanted.partition(".")
    kind = tensor_type(head) or _by_prefix(head, available)
    if kind is None:
        raise NotFound(no_such("kind", wanted, available))
    if kind not in available:
        raise NotFound(f"no {kind} here; there is {listed(available)}")
    return kind, key


def _by_prefix(head: str, available: Sequence[str]) -> str | None:
    prefix = head.strip().lower().replace(" ", "_").replace("optimizer", "optimiser")
    kinds = [kind for kind in available if prefix and kind.lower().startswith(prefix)]
    if len(kinds) > 1:
        raise NotFound(f"{head!r} is ambiguous: {' or '.join(kinds)}")
    return kinds[0] if kinds else None


def choose_layers(table: Table, kind: str, layer: Layers, key: str = "") -> list[str]:
    """Return names of a kind: all, those that a pattern matches, or the given ones.

    A parameter may be called by its module: ``"fc"`` is ``fc.weight``. Of several names, those
    that only other kinds have are left out.
    """
    available = table.layers(kind)
    if key:
        available = [name for name in available if name.endswith(f".{key}")]
        if not available:
            keys = {name.rpartition(".")[2] for name in table.layers(kind)}
            raise NotFound(no_such("state", key, sorted(keys)))
    if layer is None:
        return available
    if isinstance(layer, re.Pattern):
        matching = [name for name in available if layer.search(name)]
        if not matching:
            raise NotFound(f"no {kind} has a name that matches {layer.pattern!r}")
        return matching
    wanted = [layer] if isinstance(layer, str) else list(layer)
    if not wanted:
        raise ValueError("layer must not be empty: leave it out for all")
    known = dict.fromkeys(available)
    found = {each: _resolve(each, kind, known, key) for each in wanted}
    names = list(dict.fromkeys(name for own in found.values() for name in own))
    for each in (each for each, own in found.items() if not own):
        kinds = table.tensor_kinds() if names else []
        if not any(_resolve(each, other, dict.fromkeys(table.layers(other))) for other in kinds):
            raise NotFound(no_such(f"{kind} layer", each, available))
    return names


def _resolve(wanted: str, kind: str, known: Collection[str], key: str = "") -> list[str]:
    """Return which of the known names of a kind a text means."""
    if wanted in known:
        return [wanted]
    if kind in _PARAMETERS:
        for name in (f"{wanted}.weight", f"{wanted}.{key}", f"{wanted}.weight.{key}"):
            if name in known:
                return [name]
    if kind == Kind.OPTIMISER_STATE.value:
        for prefix in (f"{wanted}.weight.", f"{wanted}."):
            states = [name for name in known if name.startswith(prefix)]
            if states:
                return states
    return []


def choose_metrics(table: Table, metric: str | Iterable[str]) -> list[str]:
    """Return statistics after checking that the table has them."""
    wanted = [metric] if isinstance(metric, str) else list(metric)
    available = table.statistics()
    for each in wanted:
        if each not in available:
            raise NotFound(no_such("statistic", each, available))
    if not wanted:
        raise ValueError(f"scalar_metric must not be empty; there is {', '.join(available)}")
    return list(dict.fromkeys(wanted))


def check_statistics(table: Table, kind: str, names: Sequence[str]) -> None:
    """Raise NotFound, with a remedy, if tensors were captured without statistics."""
    if not table.has("count"):
        return  # a LogFrame need not count values
    rows = table.rows(kind=kind, names=names)
    if len(rows) and np.isnan(table.column("count")[rows]).all():
        raise NotFound(
            f"{names[0]!r} ({kind}) was captured without statistics: tap.track() takes them, and "
            "run.logframe() computes them from the tensors, as a source for tap.viz"
        )


def choose_step(table: Table, kind: str, names: Sequence[str], step: int | None) -> int:
    """Return the given step, or the last one; raise NotFound with the nearest steps."""
    steps = np.unique(table.step[table.rows(kind=kind, names=names)])
    if not len(steps):
        raise NotFound(f"no {kind} of {', '.join(names[:3])}")
    if step is None:
        return int(steps[-1])
    if step in steps:
        return int(step)
    near = nearest_steps(step, set(steps.tolist()))
    raise NotFound(f"no {kind} of {names[0]!r} at step {step}; {near}")
