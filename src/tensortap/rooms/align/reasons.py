"""Reasons why the values of a trainer and an engine differ, tried one by one.

Each reason predicts the log-probabilities of B from what A recorded, or from a run of A's model. It
is named if the prediction comes close to what B recorded, with the difference before and after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tensortap.rooms.align.align import LOGPROBS, at_step
from tensortap.rooms.align.contexts import BY_TOKEN, TokenRun
from tensortap.rooms.align.digest import Digest, digest_in, recorded_digests
from tensortap.rooms.align.result import Alignment, NameDifference, Reason

if TYPE_CHECKING:
    from tensortap.rooms.align.contexts import Floats, Integers

_EXPLAINED = 0.1  # the part of the difference that may remain
_SAMPLE = 2048  # rows of logits that are looked at
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_WEIGHTS, _SHIFTED = "weights of an earlier version", "positions shifted"
_LAGS = 8  # versions by which B may be late
_STEPS = 64  # at one of which B may have stopped to get new ones
_SOFTMAX = "log-softmax in another dtype"
_NEITHER = 0.02  # a temperature this close to 1 is none


def find_reasons(found: Alignment, model: Any) -> Iterator[Reason]:
    """Yield the reasons that explain a difference, those that leave least of it first."""
    assert found.runs is not None
    logprobs = next((each for each in found.names if each.kind == LOGPROBS and each.rows), None)
    explained: list[Reason] = []
    if logprobs is not None and logprobs.verdict == "differ":
        reruns: Any = None
        if model is not None:
            from tensortap.rooms.align.torch.reruns import Reruns

            reruns = Reruns(model, found)
        tried = Hypotheses(logprobs, *found.runs, reruns)
        explained = sorted(tried.all(), key=lambda reason: reason.after)
    yield from explained
    names = {each.name for each in explained}
    seen = (*_digests(*found.runs), *_positions(found))
    yield from (each for each in seen if each.name not in names)


def _digests(a: TokenRun, b: TokenRun) -> Iterator[Reason]:
    """Compare the digests of weights that both programs have recorded."""
    for name in sorted(set(a.reader.names()) & set(b.reader.names()) - set(a.names)):
        if any(digest_in(run.reader.load(run.reader.records(name)[0])) is None for run in (a, b)):
            continue
        ours, theirs = (recorded_digests(run.reader, name) for run in (a, b))
        newest = _weights(theirs[-1])
        if newest == _weights(ours[-1]):
            continue
        for earlier in reversed(ours[:-1]):
            if _weights(earlier) == newest:
                versions = f"version {earlier.version} of {name!r}; A has {ours[-1].version}"
                yield Reason(_WEIGHTS, f"by digests B has {versions}", 0.0, 0.0)
                break


def _weights(digest: Digest) -> list[str]:
    return sorted(row.digest for row in digest.rows.values())


def _positions(found: Alignment) -> Iterator[Reason]:
    """Compare the positions that both runs were given."""
    assert found.runs is not None
    a, b = (run.table for run in found.runs)
    if not all((table.position >= 0).any() for table in (a, b)):
        return
    for each in found.names:
        known = (a.position[each.entry_a] >= 0) & (b.position[each.entry_b] >= 0)
        if not known.any():
            continue
        apart = b.position[each.entry_b][known] - a.position[each.entry_a][known]
        decoded = b.decoded[each.entry_b][known]
        if not apart.any():
            return
        is_late = decoded.any() and not apart[~decoded].any()
        where, name = ("decoded tokens", "RoPE offset") if is_late else ("tokens", _SHIFTED)
        moved = apart[apart != 0]
        values, counts = np.unique(moved, return_counts=True)
        offset = int(values[counts.argmax()])
        words = f"the positions of {len(moved):,} {where} are {offset:+,} in B"
        yield Reason(name, words, each.mean, each.mean)
        return


class Hypotheses:
    """The reasons that can be tried on log-probabilities."""

    def __init__(self, each: NameDifference, a: TokenRun, b: TokenRun, reruns: Any) -> None:
        self.each, self.a, self.b, self.reruns = each, a, b, reruns
        finite = np.isfinite(each.a.reshape(-1)) & np.isfinite(each.b.reshape(-1))
        self.rows = np.flatnonzero(finite)
        self.x, self.y = (
            side.reshape(-1)[self.rows].astype(np.float64) for side in (each.a, each.b)
        )
        self.entry_a, self.entry_b = each.entry_a[self.rows], each.entry_b[self.rows]
        self.before = float(np.abs(self.y - self.x).mean()) if len(self.rows) else 0.0

    def explains(
        self, name: str, evidence: str, predicted: Floats, chosen: Any = slice(None)
    ) -> Iterator[Reason]:
        """Yield a reason if what it predicts of the chosen rows is close to what B recorded."""
        x, y = self.x[chosen], self.y[chosen]
        both = np.isfinite(predicted)
        if both.sum() < max(2, 0.5 * len(y)):
            return
        rest, change = np.abs(predicted - y)[both], np.abs(y - x)[both]
        after, before = float(rest.mean()), float(change.mean())
        limit = max(_EXPLAINED * before, 2 * self.each.tolerance)
        if after < 0.5 * before and after <= limit and np.median(rest) <= limit:
            words = f"{evidence}: mean difference {before:.3g} nats before, {after:.3g} after"
            yield Reason(name, words, before, after)

    def all(self) -> Iterator[Reason]:
        if not len(self.rows):
            return
        yield from self._shifted()
        yield from self._earlier_weights()
        yield from self._rounded_results()
        logits = self._logits()
        if logits is not None:
            yield from Distributions(self, *logits).all()
        if self.reruns is not None:
            yield from self.reruns.reasons(self)

    # -- from log-probabilities alone ------------------------------------------------------

    def _shifted(self) -> Iterator[Reason]:
        """B has the log-probability of the token before, or of the one after."""
        table = self.b.table
        at = np.full(len(table.identity), np.nan)
        at[self.entry_b] = self.x
        for offset, side in ((1, "before"), (-1, "after")):
            other = self.entry_b - offset
            inside = (other >= 0) & (other < len(at))
            other = np.clip(other, 0, len(at) - 1)
            same = inside & (table.first[other] == table.first[self.entry_b])
            predicted = np.where(same, at[other], np.nan)
            words = f"B has at each token what A has at the one {side} it"
            yield from self.explains("log-probabilities shifted by one", words, predicted)

    def _earlier_weights(self) -> Iterator[Reason]:
        """B agrees with what A recorded of the same contexts at an earlier step."""
        rows, table, other = self.a.names[self.each.name], self.a.table, self.b.table
        if not table.is_stepped:
            return
        value = rows.value.reshape(-1).astype(np.float64)
        keys, first = np.unique(at_step(table, rows.entry), return_index=True)
        own = other.step[self.entry_b]
        steps = np.unique(table.step[rows.entry])
        lags = range(1, min(int(np.ptp(steps)), _LAGS) + 1) if other.is_stepped else ()
        tried = [(f"A {lag:,} steps before", own - lag) for lag in lags]
        tried += [(f"A at step {each:,}", np.full(len(own), each)) for each in steps[:_STEPS]]
        for words, step in tried:
            wanted = at_step(other, self.entry_b, step)
            place = np.clip(np.searchsorted(keys, wanted), 0, len(keys) - 1)
            predicted = np.where(keys[place] == wanted, value[first[place]], np.nan)
            yield from self.explains(_WEIGHTS, f"B agrees with {words}", predicted)

    def _rounded_results(self) -> Iterator[Reason]:
        """Look whether all log-probabilities of one side only are numbers of a coarse dtype."""
        sides = (self.each.b, self.y, "B"), (self.each.a, self.x, "A")
        for (given, y, side), (_, x, other) in (sides, sides[::-1]):
            for name, dtype in _DTYPES.items() if given.dtype.itemsize >= 4 else ():
                is_finer = (_rounded(x, dtype) != x).mean() > 0.5
                largest = np.abs(y).max() * float(ml_dtypes.finfo(dtype).eps)
                is_close = np.abs(y - x).max() <= 4 * largest
                if is_finer and is_close and (_rounded(y, dtype) == y).all():
                    words = f"every log-probability of {side} is a {name}, those of {other} are not"
                    yield Reason(_SOFTMAX, words, self.before, 0.0)

    def _logits(self) -> tuple[Floats, Integers] | None:
        """Return logits of A from which the tokens were drawn, and the rows that they are for."""
        rows = next(
            (r for name, r in self.a.names.items()
             if "logits" in name and BY_TOKEN not in name and r.value[:1].size > 1), None,
        )  # fmt: skip
        if rows is None:
            return None if self.reruns is None else self.reruns.logits(self)
        at = np.full(len(self.a.table.identity), -1, np.int64)
        at[rows.entry] = np.arange(len(rows.entry))
        before = np.maximum(self.entry_a - 1, 0)
        same = self.a.table.first[before] == self.a.table.first[self.entry_a]
        place = np.where(same & (self.entry_a > 0), at[before], -1)
        chosen = np.flatnonzero(place >= 0)
        chosen = chosen[:: -(-len(chosen) // _SAMPLE) or 1]
        if not len(chosen):
            return None
        value = rows.value.reshape(len(rows.value), -1)[place[chosen]]
        return value.astype(np.float64), chosen


class Distributions:
    """Reasons that need the logits of A: what B did to the distribution."""

    def __init__(self, tried: Hypotheses, logits: Floats, chosen: Integers) -> None:
        self.tried, self.logits = tried, logits
        self.rows = np.arange(len(chosen))
        self.token = tried.a.table.token[tried.entry_a[chosen]]
        self.x, self.y = tried.x[chosen], tried.y[chosen]
        self._explains = functools.partial(tried.explains, chosen=chosen)

    def all(self) -> Iterator[Reason]:
        yield from self._temperature()
        yield from self._kept()
        yield from self._dtypes()

    def _logprob(self, logits: Floats) -> Floats:
        highest = logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits - highest).sum(axis=1)) + highest[:, 0]
        found: Floats = logits[self.rows, self.token] - total
        return found

    def _fitted(self, target: Floats) -> tuple[float, float]:
        """Return the temperature under which the logits come closest, and what remains."""

        def rest(temperature: float) -> float:
            return float(np.abs(self._logprob(self.logits / temperature) - target).mean())

        found = least(rest, np.geomspace(0.1, 10, 81), 40)
        return found, rest(found)

    def _temperature(self) -> Iterator[Reason]:
        (a, rest_a), (b, _) = self._fitted(self.x), self._fitted(self.y)
        if rest_a > 2 * self.tried.each.tolerance + _EXPLAINED * self.tried.before:
            return  # logits of another model
        if abs(b - a) < _NEITHER:
            return
        name, words = "another temperature", f"A has temperature {a:.3g}, B has {b:.3g}"
        if min(abs(a - 1), abs(b - 1)) < _NEITHER:
            name = "temperature not applied"
        elif min(abs(b - a * a), abs(a - b * b)) < _NEITHER:
            name = "temperature applied twice"
        yield from self._explains(name, words, self._logprob(self.logits / b))

    def _kept(self) -> Iterator[Reason]:
        """B renormalizes over the most likely tokens: all rows keep so many, or so much mass."""
        temperature, _ = self._fitted(self.x)
        logits = self.logits / (temperature if abs(temperature - 1) > _NEITHER else 1.0)
        base = self._logprob(logits)
        mass = np.exp(base - self.y)  # of what B kept
        if not (mass <= 1.01).all() or (mass > 0.9999).all():
            return
        order = -np.sort(-logits, axis=1)
        share = np.exp(order - order[:, :1])
        total = np.cumsum(share, axis=1) / share.sum(axis=1, keepdims=True)
        apart = np.abs(np.log(total) - np.log(np.minimum(mass, 1.0))[:, None])
        limit = max(4 * self.tried.each.tolerance, 1e-9)
        k = int(np.argmin(np.median(apart, axis=0)))
        if np.median(apart[:, k]) <= limit:
            predicted = base - np.log(total[:, k])
            words = f"B renormalizes over the {k + 1:,} most likely tokens"
            yield from self._explains("top-k renormalization", words, predicted)
        kept = apart.argmin(axis=1)
        fits = apart[self.rows, kept] <= limit  # prompts were not drawn
        if not fits.any():
            return
        below = np.where(kept > 0, total[self.rows, np.maximum(kept - 1, 0)], 0.0)
        low = float(np.quantile(below[fits], 0.98))
        high = float(np.quantile(total[self.rows, kept][fits], 0.02))
        if low < high + limit:
            last = np.minimum((total < (low + high) / 2).sum(axis=1), total.shape[1] - 1)
            predicted = np.where(fits, base - np.log(total[self.rows, last]), np.nan)
            words = f"B renormalizes over the most likely tokens of mass {low:.3g} to {high:.3g}"
            yield from self._explains("top-p renormalization", words, predicted)

    def _dtypes(self) -> Iterator[Reason]:
        for name, dtype in _DTYPES.items():
            logits = _rounded(self.logits, dtype)
            words = f"B computes the log-softmax of logits in {name}"
            yield from self._explains(_SOFTMAX, words, self._logprob(logits))


def least(rest: Callable[[float], float], grid: Floats, rounds: int) -> float:
    """Return the number that makes `rest` least: search a grid, then narrow it in thirds."""
    best = int(np.argmin([rest(each) for each in grid]))
    low, high = np.log(grid[max(best - 1, 0)]), np.log(grid[min(best + 1, len(grid) - 1)])
    for _ in range(rounds):
        third = (high - low) / 3
        if rest(np.exp(low + third)) < rest(np.exp(high - third)):
            high -= third
        else:
            low += third
    return float(np.exp((low + high) / 2))


def _rounded(values: Any, dtype: Any) -> Floats:
    rounded: Floats = np.asarray(values, np.float32).astype(dtype).astype(np.float64)
    return rounded
