"""Logits of attention: to 1e-12 against the whole matrix of logits."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.rooms.health.analyses.attention import (
    attention_logits,
    causal_mask,
    head_statistics,
    sample_queries,
)

CLOSE = 1e-12
RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((2, 6, 9, 8)), RNG.standard_normal((2, 3, 11, 8))


def plain(mask: np.ndarray) -> tuple[list[float], list[float]]:
    """Return the largest logit and the mean entropy per head, one query at a time."""
    largest, entropies = [], []
    for head in range(6):
        found = []
        for batch in range(2):
            for query in range(9):
                seen = mask[batch, head, query]
                logits = np.array([Q[batch, head, query] @ k for k in K[batch, head // 2]]) / 3
                logits = logits[seen] if mask.dtype == bool else logits + seen
                p = np.exp(logits) / np.exp(logits).sum()
                found.append((logits.max(), -(p[p > 0] * np.log(p[p > 0])).sum()))
        largest.append(max(each for each, _ in found))
        entropies.append(np.mean([each for _, each in found]))
    return largest, entropies


@pytest.mark.parametrize("kind", ["none", "causal", "some", "bias"])
def test_heads_that_share_keys(kind):
    masks = {
        "none": np.ones((2, 6, 9, 11), bool),
        "causal": np.broadcast_to(np.tril(np.ones((9, 11), bool)), (2, 6, 9, 11)),
        "some": RNG.random((2, 6, 9, 11)) < 0.7,
        "bias": RNG.standard_normal((2, 6, 9, 11)),
    }
    mask = causal_mask(np.arange(9), 11) if kind == "causal" else masks[kind]
    found = head_statistics(attention_logits(Q, K, 1 / 3, None if kind == "none" else mask))
    largest, entropy = plain(masks[kind])
    np.testing.assert_allclose(found.max_logit, largest, rtol=CLOSE)
    np.testing.assert_allclose(found.entropy, entropy, rtol=CLOSE)


def test_queries_that_see_no_key_do_not_count():
    mask = np.ones((2, 6, 9, 11), bool)
    mask[1, 2, 3:] = False
    mask[:, 4] = False
    found = head_statistics(attention_logits(Q, K, 1.0, mask))
    rows = [Q[b, 2, i] @ K[b, 1].T for b, i in np.ndindex(2, 9) if b == 0 or i < 3]
    p = [np.exp(row) / np.exp(row).sum() for row in rows]
    assert found.entropy[2] == pytest.approx(
        np.mean([-(x * np.log(x)).sum() for x in p]), rel=CLOSE
    )
    assert np.isneginf(found.max_logit[4])
    assert np.isnan(found.entropy[4])


def test_logits_beyond_what_exp_holds():
    found = head_statistics(np.array([[[[3000.0, 3000.0, -3000.0]]]]))
    assert found.max_logit.tolist() == [3000.0]
    assert found.entropy[0] == pytest.approx(np.log(2), rel=CLOSE)


@pytest.mark.parametrize(("sequences", "length"), [(1, 1), (1, 500), (3, 500), (100, 7), (0, 4)])
def test_the_sample_is_bounded(sequences, length):
    sample = sample_queries(sequences, length)
    assert len(sample.sequences) * len(sample.positions) <= 64
    assert len(set(sample.positions.tolist())) == len(sample.positions) <= length
    assert len(sample.sequences) == min(sequences, 4)
