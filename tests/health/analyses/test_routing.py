"""Routing of tokens to experts: to 1e-12 against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.rooms.health.analyses.experts import routing, top_experts

CLOSE = 1e-12
LOGITS = np.random.default_rng(0).standard_normal((50, 6)) * 3


def test_numbers_of_a_router():
    chosen = top_experts(LOGITS, 2)
    found = routing(LOGITS, chosen)
    tokens = [int((np.sort(LOGITS)[:, -2] <= LOGITS[:, e]).sum()) for e in range(6)]
    assert found.tokens.tolist() == tokens
    assert found.dropped == 0
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    assert found.entropy == pytest.approx(-(p * np.log(p)).sum(axis=1).mean(), rel=CLOSE)
    share = np.array(tokens) / 100
    even = -(share * np.log(share)).sum() / np.log(6)
    assert found.load_entropy == pytest.approx(even, rel=CLOSE)
    assert found.logit_max == np.abs(LOGITS).max()
    assert found.logit_rms == pytest.approx(np.sqrt((LOGITS**2).mean()), rel=CLOSE)


def test_dropped_choices_as_indices_and_as_a_mask():
    chosen = top_experts(LOGITS, 1)
    mask = np.zeros((50, 6), bool)
    mask[np.arange(50), chosen[:, 0]] = True
    mask[:10] = False
    chosen[:10] = 6  # the number of experts stands for none
    for found in (routing(LOGITS, chosen), routing(LOGITS, mask)):
        assert found.dropped == pytest.approx(0.2, rel=CLOSE)
        assert found.tokens.tolist() == mask.sum(axis=0).tolist()


def test_one_expert_and_no_tokens():
    assert routing(np.zeros((3, 1)), np.zeros((3, 1), int)).load_entropy == 0
    assert routing(np.zeros((0, 4)), np.zeros((0, 2), int)).tokens.tolist() == [0, 0, 0, 0]
