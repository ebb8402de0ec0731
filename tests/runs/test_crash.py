"""A run always opens to a consistent prefix that includes what was flushed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.capture.ticket import Ticket
from tensortap.core.buffers import Pool
from tensortap.core.files import CorruptFile
from tensortap.runs.folders import make_run
from tensortap.runs.run_reader import RunReader
from tensortap.values import rebuild
from tests.runs.readers.test_run import write
from tests.runs.test_store import large

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run with 30 batches in its tail, as a killed process leaves it."""
    run = make_run(tmp_path_factory.mktemp("runs"), 1)
    pool = Pool()
    sinks = write(run, [])
    for seq in range(30):
        sinks = sinks or write(run, [large(seq, float(seq), pool=pool)])
        if seq:
            sinks[0].write(large(seq, float(seq), pool=pool), Ticket(1), 8)
        assert sinks[0].flush(60)
    copy = tmp_path_factory.mktemp("killed") / "run"
    shutil.copytree(run, copy)
    sinks[0].close()
    return copy


@settings(max_examples=10)
@given(data=st.data())
def test_payload_file_cut_at_any_byte_raises_clear_error(killed, tmp_path_factory, data):
    copy = tmp_path_factory.mktemp("cut") / "run"
    shutil.copytree(killed, copy)
    file = sorted(copy.glob("tensors/00000/*.safetensors"))[4]
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    reader = RunReader(copy)
    heads = reader.new_records()
    assert len(heads) == 30
    broken = 0
    for head in heads:
        try:
            assert (rebuild(reader.load(head).value) == head.seq).all()
        except CorruptFile as error:
            assert file.name in str(error)  # noqa: PT017
            broken += 1
    assert broken <= 1  # each batch has its own file; the cut may only concern padding
    shutil.rmtree(copy)


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
