"""`tap.align`: match two runs token by token, and say where and why they differ."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensortap.core.arguments import checked
from tensortap.core.errors import TensortapError
from tensortap.rooms.align.contexts import (
    BY_TOKEN,
    TokenRows,
    TokenRun,
    TokenTable,
    mixed,
    read_tokens,
)
from tensortap.rooms.align.layouts import WeightNames
from tensortap.rooms.align.result import (
    AGREE,
    DIFFER,
    NONE,
    ROUNDING,
    Alignment,
    LogprobDifference,
    NameDifference,
    WorstToken,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensortap.rooms.align.contexts import Floats, Hashes, Integers

LOGPROBS, HIDDEN, EXPERTS, NUMBERS = "log-probabilities", "hidden states", "experts", "numbers"
_QUANTILES = (0.5, 0.9, 0.99)
_WORST = 10
# differences that rounding alone makes, in units of the dtype's epsilon: what other batch layouts
# of small and large models gave, times four
_USUAL, _LARGEST = 8, 64
_EPSILON = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_NOISE = 4  # a difference is rounding if it is at most so many times that of the noise
_BLOCK = 1 << 15  # rows whose intermediate results stay in the cache
_STEP = np.uint64(0x2545F4914F6CDD1D)


@checked
def align(
    a: Any,
    b: Any,
    *,
    noise: Any = None,
    model: Any = None,
    decoder: Callable[[list[int]], str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Alignment:
    """Match the values of two runs by token and context, and say where and why they differ.

    `a` is the trainer, `b` the engine: runs, their folders or live sessions, with values that were
    captured with ``tokens=``. `noise` is a rerun of `a` in another batch layout: differences of
    that size are rounding. `model` is the torch model of `a`, whose copy is run once per reason.
    `decoder` makes text of ids, such as ``tokenizer.decode``. `names` are names of `a` and what
    they are called in `b`. The result is true if nothing but rounding differs.
    """
    left, right = read_tokens(a), read_tokens(b)
    matches = _Matches(left, right, names or {})
    found = list(matches)
    epsilon = max(_epsilon(run) for run in (left, right))
    reruns = {} if noise is None else _noise_of(left, read_tokens(noise))
    judged = [
        _judged(each, reruns.get((each.name, each.kind)) or _tolerance(each, epsilon))
        for each in found
    ]
    logprobs = next((each for each in judged if each.kind == LOGPROBS), None)
    result = Alignment(
        left.path, right.path, *matches.count(found), _verdict(judged), tuple(judged),
        _logprobs(logprobs), _first(judged), worst=_worst(logprobs, left, decoder),
        unknown=left.unknown + right.unknown, runs=(left, right),
    )  # fmt: skip
    if result.verdict != DIFFER:
        return result
    from tensortap.rooms.align.reasons import find_reasons

    return dataclasses.replace(result, reasons=tuple(find_reasons(result, model)))


# -- matching ------------------------------------------------------------------------------


def _pairs(a: TokenRun, b: TokenRun, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return which names of two runs belong together, by the rules for names of weights."""
    unknown = [f"{x!r} in A" for x in names if x not in a.names]
    unknown += [f"{y!r} in B" for y in names.values() if y not in b.names]
    if unknown:
        raise TensortapError(f"names: no rows by token of {', '.join(unknown)}")
    spelled = WeightNames(a.names, b.names)
    pairs = [(x, names.get(x) or spelled(x)) for x in a.names]
    return [(x, y) for x, y in pairs if y in b.names]


class _MatchedRows(NamedTuple):
    """Matched rows of one name in both runs, in the order of A, and their entries."""

    a: Any  # an index: a slice if these are all rows in their order
    b: Any
    entry_a: Integers
    entry_b: Integers


class _Matches:
    """Match rows of pairs of names by context, and by training step if both runs have steps."""

    def __init__(self, a: TokenRun, b: TokenRun, names: Mapping[str, str]) -> None:
        self._a, self._b, self._pairs = a, b, _pairs(a, b, names)
        unique, codes = np.unique(np.concatenate(keys_of(a, b)), return_inverse=True)
        self._codes = np.split(codes, [len(a.table.identity)])  # equal keys have one number
        self._count = len(unique)
        # names mostly share their entries, and so these rows
        self._rows: dict[tuple[int, int, bool], _MatchedRows] = {}

    def __iter__(self) -> Iterator[NameDifference]:
        for name, name_b in self._pairs:
            x, y = self._a.names[name], self._b.names[name_b]
            kind = _kind(name, x, y)
            key = id(x.entry), id(y.entry), kind == LOGPROBS
            if key not in self._rows:
                self._rows[key] = self._matched(x.entry, y.entry, kind == LOGPROBS)
            yield _compared(name, name_b, kind, x, y, self._rows[key])

    def _matched(self, a: Integers, b: Integers, drawn: bool) -> _MatchedRows:
        first = [np.full(self._count, -1, np.int64) for _ in range(2)]
        for slots, entry, codes in zip(first, (a, b), self._codes, strict=True):
            # of a repeated prompt the first one counts
            slots[codes[entry[::-1]]] = np.arange(len(entry))[::-1]
        rows = first[0][(first[0] >= 0) & (first[1] >= 0)]
        rows.sort()
        if drawn:  # there is nothing from which the first token of a sequence was drawn
            rows = rows[self._a.table.place[a[rows]] > 0]
        others = first[1][self._codes[0][a[rows]]]
        return _MatchedRows(_index(rows, len(a)), _index(others, len(b)), a[rows], b[others])

    def count(self, found: Sequence[NameDifference]) -> tuple[int, int, int]:
        """Return the number of contexts in A, in B, and of those that were compared."""
        entries = {id(each.entry_a): each.entry_a for each in found}.values()
        groups = *([each] for each in self._codes), [self._codes[0][each] for each in entries]
        counts = []
        for group in groups:
            seen = np.zeros(self._count, np.bool_)
            for codes in group:
                seen[codes] = True
            counts.append(int(seen.sum()))
        return counts[0], counts[1], counts[2]


def _index(rows: Integers, count: int) -> Any:
    is_all = len(rows) == count and np.array_equal(rows, np.arange(count))
    return slice(None) if is_all else rows


def keys_of(a: TokenRun, b: TokenRun) -> tuple[Hashes, Hashes]:
    """Return what rows are matched by: the context, and the step if both runs have the same."""
    tables = a.table, b.table
    shared = all(table.is_stepped for table in tables) and np.isin(tables[0].step, tables[1].step)
    if not np.any(shared):
        return a.table.identity, b.table.identity
    return at_step(a.table), at_step(b.table)


def at_step(table: TokenTable, entry: Any = slice(None), step: Integers | None = None) -> Hashes:
    """Return identities of contexts at training steps: those of the table, or others."""
    step = table.step[entry] if step is None else step
    found: Hashes = table.identity[entry] ^ mixed(step.astype(np.uint64) * _STEP)
    return found


# -- differences ---------------------------------------------------------------------------


def _compared(
    name: str, name_b: str, kind: str, x: TokenRows, y: TokenRows, rows: _MatchedRows
) -> NameDifference:
    if x.value.shape[1:] != y.value.shape[1:]:
        shapes = f"{x.value.shape[1:]} and {y.value.shape[1:]}"
        raise TensortapError(f"{name!r}: rows have the shapes {shapes}: pass names={{…}}")
    left, right = x.value[rows.a], y.value[rows.b]
    difference = _DIFFERENCES[kind](left, right, name.endswith(BY_TOKEN))
    size = np.abs(difference)
    largest = float(size.max(initial=0.0))
    if math.isnan(largest):
        size[np.isnan(size)] = largest = np.inf
    plain, plain_b = name.removesuffix(BY_TOKEN), name_b.removesuffix(BY_TOKEN)
    count = len(size)
    mean = float(size.mean(dtype=np.float64)) if count else 0.0
    share = np.count_nonzero(size) / max(count, 1)
    return NameDifference(
        plain, plain_b, kind, x.type or y.type, count, mean, largest, _quantiles(size), share,
        NONE, 0.0, rows.entry_a, rows.entry_b, left, right, difference,
    )  # fmt: skip


def _kind(name: str, a: TokenRows, b: TokenRows) -> str:
    if a.value.dtype.kind in "iub" and b.value.dtype.kind in "iub":
        return EXPERTS
    if a.value[0:1].size > 1:
        return HIDDEN
    return LOGPROBS if "logp" in name.lower().replace("_", "") else NUMBERS


def _of_logprobs(a: NDArray[Any], b: NDArray[Any], _: bool) -> Floats:
    x, y = a.reshape(-1).astype(np.float64), b.reshape(-1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.where(x == y, 0.0, y - x)


def _of_numbers(a: NDArray[Any], b: NDArray[Any], _: bool) -> Floats:
    found: NDArray[Any] = np.empty(a.size, np.result_type(a, b, np.float32))
    for begin in range(0, a.size, _BLOCK):
        x, y = (each.reshape(-1)[begin : begin + _BLOCK] for each in (a, b))
        out = found[begin : begin + _BLOCK]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            np.abs(np.subtract(y, x, out=out), out=out)
            out /= np.maximum(np.abs(x), np.abs(y))
        if np.isnan(out.sum()):  # zeros and infinities
            out[x == y] = 0.0
    return found


def _of_hidden(a: NDArray[Any], b: NDArray[Any], is_sketch: bool) -> Floats:
    """Return |a - b| ÷ the larger of |a| and |b|, row by row."""
    x, y = _flat(a), _flat(b)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if is_sketch:
            size, apart = np.maximum(x[:, 0], y[:, 0]), x[:, 1:] - y[:, 1:]
        else:
            size = np.maximum(*(np.sqrt(np.einsum("ij,ij->i", z, z)) for z in (x, y)))
            apart = x - y
        found = np.sqrt(np.einsum("ij,ij->i", apart, apart)) / size
    found[(x == y).all(axis=1)] = 0.0
    return np.asarray(found, np.float64)


def _flat(rows: NDArray[Any]) -> NDArray[Any]:
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _of_experts(a: NDArray[Any], b: NDArray[Any], _: bool) -> Floats:
    """Return the share of other experts of each token, whatever their order."""
    x, y = (np.sort(_flat(z), axis=1) for z in (a, b))
    return np.asarray((x != y).mean(axis=1), np.float64)


_DIFFERENCES = {
    LOGPROBS: _of_logprobs, NUMBERS: _of_numbers, HIDDEN: _of_hidden, EXPERTS: _of_experts,
}  # fmt: skip


# -- verdicts ------------------------------------------------------------------------------


def _epsilon(run: TokenRun) -> float:
    """Return the distance of neighbors near 1, in the dtype that most names of a run have."""
    dtypes = [rows.dtype for rows in run.names.values() if rows.value.dtype.kind == "f"]
    counts = collections.Counter(_EPSILON.get(dtype, 2.0**-23) for dtype in dtypes)
    return max(counts, key=lambda epsilon: (counts[epsilon], epsilon), default=2.0**-23)


class _Tolerance(NamedTuple):
    usual: float  # of the median
    largest: float


def _tolerance(each: NameDifference, epsilon: float) -> _Tolerance:
    if each.kind == EXPERTS:
        return _Tolerance(0.0, 0.0 if epsilon < 1e-6 else 1.0)
    scale = 1.0
    if each.kind == LOGPROBS and len(each.a):  # a difference of logits, which are of this size
        finite = np.abs(each.a[np.isfinite(each.a)])
        scale = max(1.0, float(np.median(finite))) if len(finite) else 1.0
    return _Tolerance(_USUAL * epsilon * scale, _LARGEST * epsilon * scale)


def _noise_of(a: TokenRun, noise: TokenRun) -> dict[tuple[str, str], _Tolerance]:
    """Return how far a rerun is from `a`, by name and kind."""
    tolerances = {}
    for each in _Matches(a, noise, {}):
        least = 2.0**-23 if each.kind != EXPERTS else 0.0
        usual = max(each.quantiles[0], each.quantiles[1] / 2, least)
        largest = max(each.largest, 2 * usual)
        if each.rows:
            tolerances[each.name, each.kind] = _Tolerance(_NOISE * usual, _NOISE * largest)
    return tolerances


def _judged(each: NameDifference, tolerance: _Tolerance) -> NameDifference:
    verdict = DIFFER
    if not each.rows:
        verdict = NONE
    elif each.largest == 0:
        verdict = AGREE
    elif each.quantiles[0] <= tolerance.usual and each.largest <= tolerance.largest:
        verdict = ROUNDING
    return dataclasses.replace(each, verdict=verdict, tolerance=tolerance.usual)


def _quantiles(size: Floats) -> tuple[float, ...]:
    """Return the elements at quantiles, or the next larger ones; reorder the array."""
    found, begin = [0.0] * len(_QUANTILES), 0
    for i, q in enumerate(_QUANTILES if len(size) else ()):
        rank = math.ceil(q * (len(size) - 1))
        size[begin:].partition(rank - begin)  # what is before is smaller
        found[i], begin = float(size[rank]), rank
    return tuple(found)


def _verdict(judged: Sequence[NameDifference]) -> str:
    found = {each.verdict for each in judged}
    return next((v for v in (DIFFER, ROUNDING, AGREE) if v in found), NONE)


def _first(judged: Sequence[NameDifference]) -> NameDifference | None:
    """Return the first layer that differs: modules are in the order in which they ended."""
    layers = [each for each in judged if each.kind in (HIDDEN, EXPERTS, NUMBERS)]
    return next((each for each in layers if each.verdict == DIFFER), None)


def _logprobs(each: NameDifference | None) -> LogprobDifference | None:
    if each is None or not each.rows:
        return None
    log_ratio = -np.clip(np.nan_to_num(each.difference, nan=0.0), -700, 700)  # of A to B
    ratio = np.exp(log_ratio)
    return LogprobDifference(
        each.name, each.rows, each.mean, each.largest,
        {str(q): value for q, value in zip(_QUANTILES, each.quantiles, strict=True)},
        float(np.mean(-log_ratio)), float(np.mean(ratio - 1 - log_ratio)),
        float(((ratio < 0.8) | (ratio > 1.2)).mean()),
    )  # fmt: skip


def _worst(
    each: NameDifference | None, run: TokenRun, decoder: Callable[[list[int]], str] | None
) -> tuple[WorstToken, ...]:
    if each is None:
        return ()
    order = np.argsort(-np.abs(each.difference), kind="stable")[:_WORST]
    found = []
    for row in order.tolist():
        if each.difference[row] == 0:
            break
        entry = int(each.entry_a[row])
        context = run.table.context(entry)
        text = "" if decoder is None else decoder(context)
        a, b = (float(side.reshape(-1)[row]) for side in (each.a, each.b))
        place = int(run.table.place[entry])
        found.append(WorstToken(context[-1], place, a, b, tuple(context), str(text)))
    return tuple(found)
