"""Rows on comparing arrays."""

from __future__ import annotations

from bench.harness import Row, in_turns, time_of

MANY = 1 << 26  # 256 MiB of float32


def comparing_arrays() -> list[Row]:
    import numpy as np

    from tensortap.rooms.compare import compare_values

    a = np.random.default_rng(0).standard_normal(MANY, np.float32)
    near = a * np.float32(1 + 3e-7)  # differs everywhere, but passes
    same = a.copy()
    ours, equal, equals, equal_same = in_turns(
        21,
        lambda: time_of(lambda: compare_values(a, near, threads=1)),
        lambda: time_of(lambda: np.array_equal(a, near)),
        lambda: time_of(lambda: compare_values(a, same, threads=1)),
        lambda: time_of(lambda: np.array_equal(a, same)),
    )
    again, close = in_turns(
        5,
        lambda: time_of(lambda: compare_values(a, near, threads=1)),
        lambda: time_of(lambda: np.allclose(a, near)),
    )
    note = "256 MiB of float32, one thread"
    return [
        Row(
            "compare arrays, all elements differ ÷ numpy.array_equal",
            2.5,
            True,
            ours,
            equal,
            note=note,
        ),
        Row(
            "compare arrays, all equal ÷ numpy.array_equal",
            2.5,
            True,
            equals,
            equal_same,
            note=note,
        ),
        Row(
            "compare arrays, all elements differ ÷ numpy.allclose",
            0.25,
            True,
            again,
            close,
            note=note,
        ),
    ]


ROWS = (comparing_arrays,)
