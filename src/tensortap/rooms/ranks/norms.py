"""Numbers that ranks have noted, beside each other: the norms of clipping, and losses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensortap.alerts import Alert
from tensortap.core.record import Kind
from tensortap.table.shard_keys import SHARD
from tensortap.table.table import Table

NORM, LIMIT = "clip_norm", "clip_limit"
"""Metrics of `tensortap run`: the norm that was used for clipping, and the largest one allowed."""
_PATIENCE = 3  # steps
_SAME_STEPS = 10  # steps with the same losses on all ranks


class ClippedNorms:
    """Finds clipping by a norm that is not that of the whole model, in the table of a run."""

    def __init__(self, table: Table) -> None:
        self._table = table

    @property
    def rules(self) -> tuple[str, ...]:
        """The rule, if there is anything to compare."""
        known = NORM in self._table.index().names and len(self._table.ranks()) > 1
        return ("clip_norm",) if known else ()

    def get(self) -> list[Alert]:
        """Return an alert if clipping has been wrong for three steps."""
        if not self.rules:
            return []
        norms, limits = (by_rank(self._table, name) for name in (NORM, LIMIT))
        both = {step: list(found.values()) for step, found in norms.items() if len(found) > 1}
        found = [
            (step, f"ranks have clipped by norms from {min(each):.4g} to {max(each):.4g}")
            for step, each in both.items() if max(each) > 1.001 * min(each)
        ]  # fmt: skip
        if len(found) < _PATIENCE:
            found = []
            for step, whole in self._whole_norms().items() if both else ():
                used = both.get(step, [0.0])[0]
                left = min(used, *limits.get(step, {0: used}).values())  # after clipping
                if used and abs(whole - left) > 0.05 * left:
                    norm = whole * used / left
                    text = f"gradients are clipped by a norm of {used:.4g}, and all have {norm:.4g}"
                    found.append((step, text))
        if len(found) < _PATIENCE:
            return []
        step, text = found[0]
        advice = (
            f"{text}: add the squares of all shards, and of each replicated, expert or "
            "tensor-parallel gradient once; clip_grad_norm_() does so for DTensors"
        )
        return [Alert("clip_norm", "model", Kind.WEIGHT_GRADIENT, step, 0, "", advice)]

    def _whole_norms(self) -> dict[int, float]:
        """Return the norm of all gradients in each step, if any are sharded."""
        rows = _gradients(self._table)
        if not self._table.shard_keys().has(SHARD, rows).any():
            return {}
        whole = self._table.whole()
        rows = _gradients(whole)
        squares = whole.column("count")[rows] * whole.column("rm2")[rows] ** 2
        steps, place = np.unique(whole.step[rows], return_inverse=True)
        norms = np.sqrt(np.bincount(place, squares))
        return dict(zip(steps.tolist(), norms.tolist(), strict=True))


def _gradients(table: Table) -> NDArray[np.int64]:
    kind = table.kinds.index(Kind.WEIGHT_GRADIENT.value)
    return np.flatnonzero(table.kind == kind)


class SameLosses:
    """Finds replicas that all compute the same loss, as if each got the same data."""

    def __init__(self, table: Table) -> None:
        self._table = table

    @property
    def rules(self) -> tuple[str, ...]:
        """The rule, if there are several losses."""
        known = "loss" in self._table.index().names and len(self._table.ranks()) > 1
        return ("same_data",) if known else ()

    def get(self) -> list[Alert]:
        """Return an alert if the first losses are the same on all ranks, bit for bit."""
        found = by_rank(self._table, "loss") if self.rules else {}
        steps = sorted(found)[:_SAME_STEPS]
        ranks = len(self._table.ranks())
        same = [len(found[n]) == ranks and len({*found[n].values()}) == 1 for n in steps]
        values = {value for step in steps for value in found[step].values()}
        if len(steps) < _SAME_STEPS or not all(same) or len(values) < 3 or not self._has_replicas():
            return []
        text = (
            f"all {ranks} ranks compute the same loss in each step, so they get the same data: "
            "give each its part, as DistributedSampler does"
        )
        return [Alert("same_data", "loss", Kind.METRIC, steps[0], 0, "", text)]

    def _has_replicas(self) -> bool:
        """Return whether all weights are the same on all ranks; parts of a model may share data."""
        table = self._table
        rows = (
            np.flatnonzero(table.kind == table.kinds.index(Kind.WEIGHT.value))
            if Kind.WEIGHT.value in table.kinds
            else np.empty(0, np.int64)
        )
        if not len(rows) or table.shard_keys().has(SHARD, rows).any():
            return False
        rows = rows[table.step[rows] == table.step[rows].max()]
        seen = set(zip(table.name[rows].tolist(), table.column("rm2")[rows].tolist(), strict=True))
        return len(seen) == len(np.unique(table.name[rows]))


def by_rank(table: Table, name: str) -> dict[int, dict[int, float]]:
    """Return a metric by step and rank."""
    table = table.near([(Kind.METRIC.value, name)])
    found: dict[int, dict[int, float]] = {}
    rows = table.series(Kind.METRIC.value, name)
    columns = table.step[rows], table.rank[rows], table.column("value")[rows]
    for step, rank, value in zip(*(each.tolist() for each in columns), strict=True):
        found.setdefault(step, {})[rank] = value
    return found
