"""The family ``attention``: how large logits get, and how far attention is spread.

Of each head, some queries are looked at.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.core.record import Kind
from tensortap.rooms.health.analyses.activations import evenly_spaced
from tensortap.rooms.health.analyses.analysis import Analysis, Give
from tensortap.rooms.health.analyzing import ModuleOutput

Reals = NDArray[np.float64]

QUERIES = 64
"""Queries per head whose logits are computed, at most: of up to 4 sequences, evenly spaced."""

_SEQUENCES = 4


class QuerySample(NamedTuple):
    """The indices of sequences and of positions in them whose queries are looked at."""

    sequences: NDArray[np.int64]
    positions: NDArray[np.int64]


class HeadStatistics(NamedTuple):
    """Per head: the largest logit, and the mean entropy of the attention in nats."""

    max_logit: Reals
    entropy: Reals


def sample_queries(sequences: int, length: int) -> QuerySample:
    """Return which queries are looked at; always the same ones for a shape.

    >>> sample = sample_queries(8, 100)
    >>> sample.sequences.tolist(), len(sample.positions), sample.positions[-1]
    ([0, 2, 4, 7], 16, np.int64(99))
    """
    picked = evenly_spaced(sequences, _SEQUENCES)
    return QuerySample(picked, evenly_spaced(length, QUERIES // max(len(picked), 1)))


def attention_logits(
    queries: Reals, keys: Reals, scale: float, mask: NDArray[Any] | None = None
) -> Reals:
    """Return the logits as the softmax gets them: sequence, head, query, key.

    `queries` are (sequence, head, query, width), `keys` (sequence, head, key, width); several heads
    of queries in a row may share a head of keys. A `mask` of booleans says which keys are seen, one
    of numbers is added; -inf stands for a key that is not seen.

    >>> one = np.ones((1, 2, 1, 4))
    >>> attention_logits(one, one[:, :1], 0.5, np.array([True])).ravel().tolist()
    [2.0, 2.0]
    """
    batch, heads, length, width = queries.shape
    shared = keys.shape[1]
    grouped = queries.reshape(batch, shared, heads // shared * length, width)
    products = np.matmul(grouped, keys.transpose(0, 1, 3, 2)) * scale
    logits: Reals = products.reshape(batch, heads, length, keys.shape[2])
    if mask is None:
        return logits
    return np.where(mask, logits, -np.inf) if mask.dtype == np.bool_ else logits + mask


def causal_mask(positions: NDArray[np.int64], keys: int) -> NDArray[np.bool_]:
    """Return which keys the queries at these positions see: those up to their own position.

    >>> causal_mask(np.array([0, 2]), 4).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0]]
    """
    seen: NDArray[np.bool_] = np.arange(keys) <= positions[:, None]
    return seen


def head_statistics(logits: Reals) -> HeadStatistics:
    """Return the largest logit and the entropy of each head; queries that see no key do not count.

    >>> found = head_statistics(np.array([[[[2.0, 2.0, -np.inf]]]]))
    >>> found.max_logit.tolist(), found.entropy.round(6).tolist()
    ([2.0], [0.693147])
    """
    largest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    with np.errstate(all="ignore"):
        below = logits - largest
        weights = np.exp(below)
        total = weights.sum(axis=-1)
        products = np.where(weights == 0, 0.0, weights * below)
        entropy = np.log(total) - products.sum(axis=-1) / total
    blind = np.isneginf(largest[..., 0])
    heads = np.where(blind, 0.0, entropy).sum(axis=(0, 2)), (~blind).sum(axis=(0, 2))
    with np.errstate(all="ignore"):
        return HeadStatistics(largest.max(axis=(0, 2, 3), initial=-np.inf), heads[0] / heads[1])


class AttentionHeads(Analysis):
    """The largest logit and the mean entropy per head, over all calls of a module in a step."""

    def __init__(self, give: Give, unseen: dict[str, str]) -> None:
        super().__init__(give, unseen)
        self._heads: dict[str, list[HeadStatistics]] = {}
        self._rows: dict[str, str] = {}  # module → its first tensor, which has a row

    def detach(self) -> None:
        super().detach()
        self._heads.clear()
        self._rows.clear()

    def attention(self, name: str, logits: NDArray[np.float64]) -> None:
        self._heads.setdefault(name, []).append(head_statistics(logits))

    def output(self, seen: ModuleOutput) -> None:
        if seen.arrays:
            self._rows[seen.name] = seen.arrays[0].name

    def end_step(self) -> None:
        for name, calls in self._heads.items():
            alike = [each for each in calls if len(each.entropy) == len(calls[0].entropy)]
            largest = np.max([each.max_logit for each in alike], axis=0)
            entropy = np.mean([each.entropy for each in alike], axis=0)
            numbers = {"max_logit": float(largest.max()), "entropy": float(entropy.mean())}
            for head in range(len(entropy)):
                numbers[f"max_logit_{head}"] = float(largest[head])
                numbers[f"entropy_{head}"] = float(entropy[head])
            self.give(Kind.ACTIVATION, self._rows.get(name, name), numbers)
        self._heads.clear()
