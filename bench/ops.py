"""Rows on operations: every operation recorded, beside torch's DebugMode on the same step."""

from __future__ import annotations

import time

from bench.harness import Row, in_turns
from bench.track import _gpt


def _timed(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def operations() -> list[Row]:
    """Measure what a step costs beyond itself, beside hashes of outputs, and of inputs as well.

    `tap.ops` always records the digests of both, and statistics.
    """
    from torch.utils._debug_mode import DebugMode

    import tensortap as tap

    rows = []
    for size in ((2, 64, 4, 32), (4, 256, 8, 128)):
        training = _gpt(*size)

        def ours(training=training) -> float:
            with tap.ops(training.model):
                return _timed(training.step)

        def theirs(inputs: bool, training=training) -> float:
            hashes = DebugMode.log_tensor_hashes(hash_inputs=inputs)
            with DebugMode(record_nn_module=True), hashes:
                return _timed(training.step)

        ours(), theirs(True)
        base = sorted(_timed(training.step) for _ in range(5))[2]
        found = in_turns(5, ours, lambda: theirs(False), lambda: theirs(True))
        a, outputs, both = ([value - base for value in each] for each in found)
        note = f"extra time per step of {base * 1e3:.0f} ms: {sorted(a)[2] * 1e3:.0f} ms"
        for words, b in (("outputs", outputs), ("inputs and outputs", both)):
            name = f"operations of a GPT of {size[0]} layers, {size[1]} wide ÷ DebugMode, {words}"
            rows.append(Row(name, 0.5, True, a, b, note=note))
    return rows


def black_box() -> list[Row]:
    """Measure 50 steps with one snapshot among them."""
    import tensortap as tap

    training = _gpt(4, 128, 8, 64)
    box = tap.blackbox(lambda batch: training.step(), training.model, training.optimizer)
    batch = training.data
    box(batch)

    def ours() -> float:
        return _timed(lambda: [box(batch) for _ in range(50)])

    def base() -> float:
        return _timed(lambda: [training.step() for _ in range(50)])

    a, b = in_turns(3, ours, base)
    held = f"{box.nbytes / 1e6:.0f} MB held"
    return [Row("steps with a black box, every=50 ÷ without", 1.02, True, a, b, note=held)]


ROWS = (operations, black_box)
