"""Payload files."""

import numpy as np

import tensortap as tap


def test_memory_of_a_payload_is_reused_only_when_nobody_holds_it(tmp_path):
    path = tap.init(tmp_path)
    for step in range(4):
        tap.catch(np.full(300_000, float(step)), "x")  # large enough to be recycled
        tap.step()
    tap.finish()
    run = tap.open(path)
    first = run.get("x", step=0)
    held, part = np.asarray(first), np.asarray(first)[::7]
    del first
    others = [run.get("x", step=step).copy() for step in (1, 2, 3, 1)]
    assert (held == 0).all()
    del held
    assert (run.get("x", step=2) == 2).all()
    assert (part == 0).all()
    assert [other[0] for other in others] == [1, 2, 3, 1]
