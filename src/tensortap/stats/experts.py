"""Statistics of routers in mixtures of experts: load per expert, dropped tokens, entropy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensortap.stats.attention import head_statistics

Reals = NDArray[np.float64]


class Routing(NamedTuple):
    """The tokens of each expert, and numbers about the logits of their router.

    `dropped` is the share of choices that no expert processes, `load_entropy` is that of the
    tokens per expert, divided by that of an even distribution.
    """

    tokens: NDArray[np.int64]
    dropped: float
    load_entropy: float
    entropy: float
    logit_max: float
    logit_rms: float


def routing(logits: Reals, chosen: NDArray[Any], per_token: int | None = None) -> Routing:
    """Return how tokens are routed.

    `logits` are (token, expert). `chosen` are the experts of each token, of which those outside
    of the range are dropped; or, as booleans, whether an expert processes a token. A token has
    `per_token` choices, by default as many as it has columns of `chosen`.

    >>> found = routing(np.zeros((4, 2)), np.array([[0], [0], [1], [2]]))
    >>> found.tokens.tolist(), found.dropped, round(found.entropy, 3)
    ([2, 1], 0.25, 0.693)
    """
    count, experts = logits.shape
    if chosen.dtype == np.bool_:
        tokens = chosen.sum(axis=0)
    else:
        kept = chosen[(chosen >= 0) & (chosen < experts)]
        tokens = np.bincount(kept.astype(np.int64), minlength=experts)
        per_token = per_token or chosen.shape[-1]
    choices = count * (per_token or 1)
    share = tokens[tokens > 0] / max(tokens.sum(), 1)
    even = math.log(experts) if experts > 1 else 1.0
    finite = logits[np.isfinite(logits)]
    return Routing(
        tokens.astype(np.int64),
        1.0 - float(tokens.sum()) / choices if choices else 0.0,
        -float((share * np.log(share)).sum()) / even,
        float(head_statistics(logits[None, None]).entropy[0]),
        float(np.abs(finite).max(initial=0.0)),
        float(np.sqrt((finite * finite).mean())) if finite.size else math.nan,
    )


def top_experts(logits: Reals, per_token: int) -> NDArray[np.int64]:
    """Return the experts with the largest logits of each token.

    >>> top_experts(np.array([[0.1, 0.3, 0.2]]), 2).tolist()
    [[2, 1]]
    """
    found: NDArray[np.int64] = np.argsort(logits, axis=-1, kind="stable")[:, -per_token:]
    return found
