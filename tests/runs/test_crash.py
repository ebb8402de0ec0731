"""A run always opens to a consistent prefix that includes what was flushed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

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

WRITER = """
import sys, numpy as np
from pathlib import Path
from tensortap.core.buffers import Pool
from tensortap.runs import sink as store
from tensortap.capture.queue import Queue
from tests.runs.test_store import large, put
store._TAIL_ROWS, store._AGE = 50, 0.01
sink, pool = Queue(store.StoreSink(Path(sys.argv[1]), 0), budget=1 << 28, overflow="newest",
                        name="t"), Pool()
for seq in range(100_000):
    put(sink, large(seq, float(seq), name="w" if seq % 3 else "v", pool=pool))
    if seq % 7 == 0 and sink.flush(60):
        print(seq, flush=True)
"""


@pytest.mark.fault("kill -9 of a program that writes a run")
def test_kill_9_keeps_what_was_flushed(tmp_path, rounds):
    """While tables are sealed; test_faults.py kills whole programs."""
    root = Path(__file__).parents[2]
    env = dict(os.environ, PYTHONPATH=f"{root / 'src'}:{root}")
    for number in range(rounds(2, 6)):
        run = make_run(tmp_path / str(number), 1)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run)], env=env, stdout=subprocess.PIPE, text=True
        )
        first = writer.stdout.readline()
        assert first.strip() == "0"
        time.sleep(random.Random(number).uniform(0.0, 0.4))  # a different moment in each round
        writer.send_signal(signal.SIGKILL)
        confirmed = [0, *map(int, writer.communicate()[0].split())]
        reader = RunReader(run)
        found = [reader.load(head) for head in reader.new_records()]
        assert [r.seq for r in found] == list(range(len(found)))  # a prefix, without holes
        assert len(found) > max(confirmed)
        for record in (*found[:3], *found[-20:]):
            assert (rebuild(record.value) == record.seq).all()


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


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.fault("truncation at every byte of a run", tried=60)
def test_tail_cut_at_any_byte_opens_to_a_prefix(killed, tmp_path_factory, data):
    copy = tmp_path_factory.mktemp("cut") / "run"
    shutil.copytree(killed, copy, copy_function=os.link)
    tail = copy / "records" / "00000" / "tail.arrows"
    content = tail.read_bytes()
    length = data.draw(st.integers(0, len(content)))
    tail.unlink()
    tail.write_bytes(content[:length])
    reader = RunReader(copy)
    found = [reader.load(head) for head in reader.new_records()]
    assert [r.seq for r in found] == list(range(len(found)))
    whole = len(found) == 30
    assert whole or reader.truncated.get(0, 0) > 0 or length <= _boundaries(content)[len(found)]
    if length == len(content):
        assert whole
        assert not reader.truncated
    for record in found[-2:]:
        assert (rebuild(record.value) == record.seq).all()
    shutil.rmtree(copy)


def _boundaries(content: bytes) -> list[int]:
    """Return where the batches of a tail begin and end."""
    import pyarrow as pa

    stream = pa.BufferReader(content)
    schema = pa.ipc.read_schema(pa.ipc.read_message(stream))
    ends = [stream.tell()]
    while stream.tell() < len(content):
        pa.ipc.read_record_batch(pa.ipc.read_message(stream), schema)
        ends.append(stream.tell())
    return ends


@settings(max_examples=40)
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
