"""The NumPy fallback: bit patterns, memory, chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensortap.core.record import Summary
from tensortap.stats import numpy_summary
from tensortap.stats.merge import merge
from tensortap.stats.numpy_summary import summarize_array

Reference = Callable[[Iterable[float]], Summary]
AssertClose = Callable[[Summary, Summary, float], None]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int16, np.uint16])
def test_patterns_and_direct_pass_agree(
    dtype: Any, assert_close: AssertClose, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, 200_000, dtype=np.uint16)
    x = bits.view(dtype)
    assert numpy_summary._by_patterns(x)
    by_patterns = summarize_array(x)
    monkeypatch.setattr(numpy_summary, "_WORTH_A_TABLE", 1 << 40)
    assert not numpy_summary._by_patterns(x)
    assert_close(by_patterns, summarize_array(x), 1e-9)


@given(st.data(), st.sampled_from([np.float16, ml_dtypes.bfloat16, np.int16, np.uint16]))
def test_16_bit_with_and_without_patterns(
    reference: Reference, assert_close: AssertClose, data: st.DataObject, dtype: Any
) -> None:
    x = data.draw(hnp.arrays(np.uint16, st.integers(0, 40))).view(dtype)
    want = reference([float(v) for v in x])
    assert_close(summarize_array(x), want, 1e-9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_summary, "_WORTH_A_TABLE", 0)
        assert_close(summarize_array(x), want, 1e-9)


def test_memory_stays_small() -> None:
    import tracemalloc

    x = np.random.default_rng(0).standard_normal((1 << 22) + 5).astype(np.float32)
    for view in (x, x[1:].reshape(2, -1)[:, ::2]):
        tracemalloc.start()
        summarize_array(view)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20


def test_chunks_are_merged_like_shards(assert_close: AssertClose) -> None:
    x = np.random.default_rng(0).standard_normal(3 * numpy_summary._CHUNK + 17)
    shards = merge(*(summarize_array(x[i::7]) for i in range(7)))
    assert_close(shards, summarize_array(x), 1e-12)
