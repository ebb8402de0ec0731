"""A run always opens to a consistent prefix that includes what was flushed."""

from __future__ import annotations

import numpy as np
import pytest

from tensortap.core.files import CorruptFile
from tensortap.runs.folders import make_run
from tensortap.runs.run_reader import RunReader
from tests.runs.readers.test_run import write
from tests.runs.test_store import large

pytestmark = pytest.mark.slow


def test_broken_table_raises_clear_error(tmp_path):
    run = make_run(tmp_path, 1)
    write(run, [large(0, 1.0)])[0].close(60)
    (part,) = run.glob("records/*/*.parquet")
    content = part.read_bytes()
    for length in (0, 3, 10, len(content) // 2, len(content) - 1):
        part.write_bytes(content[:length])
        with pytest.raises(CorruptFile, match=r"0000\.parquet"):
            RunReader(run)
    part.write_bytes(np.random.default_rng(0).bytes(len(content)))
    with pytest.raises(CorruptFile, match=r"0000\.parquet"):
        RunReader(run)


def test_crash_between_sealing_and_new_tail_shows_nothing_twice(tmp_path):
    run = make_run(tmp_path, 1)
    sinks = write(run, [large(seq, float(seq)) for seq in range(5)])
    assert sinks[0].flush(60)
    tail = run / "records" / "00000" / "tail.arrows"
    old = tail.read_bytes()
    sinks[0].close(60)
    tail.write_bytes(old)  # as if the new tail had never been written
    assert [r.seq for r in RunReader(run).new_records()] == list(range(5))
