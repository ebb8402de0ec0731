"""Recycled memory: blocks are reused, and never leased twice."""

from __future__ import annotations

import collections
import fcntl
import gc
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap import buffers
from tensortap.buffers import (
    SLAB,
    MappedSegment,
    OutOfMemory,
    Pool,
    RemoteBlock,
    Segment,
    size_class,
    view_of,
)

SOURCE = str(Path(__file__).parents[1] / "src")


@given(st.integers(0, 1 << 45))
def test_a_block_is_at_most_a_quarter_larger(nbytes):
    size = size_class(nbytes)
    assert size >= max(nbytes, 1)
    assert size % 4096 == 0
    assert size <= max(4096, nbytes * 1.25, nbytes + 4096)
    assert size_class(size) == size


@given(st.integers(1, 1 << 45))
def test_larger_values_never_get_smaller_blocks(nbytes):
    assert size_class(nbytes) >= size_class(nbytes - 1)


def test_reuses_a_returned_block():
    pool = Pool()
    lease = pool.acquire(100_000)
    where = lease.address
    lease.writable[:] = b"x" * 100_000
    assert bytes(lease.view) == b"x" * 100_000
    taken = pool.nbytes
    del lease
    for _ in range(100):
        assert pool.acquire(100_000).address == where
    assert pool.nbytes == taken


def test_small_blocks_share_a_segment_and_large_ones_do_not():
    pool = Pool()
    small = [pool.acquire(1 << 20) for _ in range(SLAB >> 20)]
    assert len({lease.segment.number for lease in small}) == 1
    assert pool.acquire(1 << 20).segment is not small[0].segment
    large = [pool.acquire(SLAB // 2) for _ in range(3)]
    assert len({lease.segment.number for lease in large}) == 3


@given(st.lists(st.tuples(st.integers(1, 300_000), st.integers(0, 5)), max_size=40))
@settings(max_examples=60)
def test_leased_blocks_never_overlap(requests):
    pool = Pool(shared=False)
    held = []
    for nbytes, drop in requests:
        held.append(pool.acquire(nbytes))
        assert held[-1].writable.nbytes == nbytes
        if drop < len(held):
            held.pop(drop)
        spans = sorted((lease.address, lease.address + lease.nbytes) for lease in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_many_threads_share_a_pool():
    pool = Pool(shared=False)
    wrong = []

    def work(mark: int) -> None:
        for _ in range(300):
            leases = [pool.acquire(size) for size in (5000, 70_000, 5000)]
            for lease in leases:
                lease.writable[:] = bytes([mark]) * lease.nbytes
            wrong.extend(lease for lease in leases if set(lease.view[::997]) != {mark})

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pool.trim(-1)
    assert pool.nbytes == 0, "a block was not returned"


def test_retired_segment_is_never_leased_again():
    pool = Pool()
    held = pool.acquire(1 << 20)
    segment = held.segment
    held.writable[:4] = b"keep"
    pool.retire(segment)
    assert all(pool.acquire(1 << 20).segment is not segment for _ in range(100))
    assert bytes(held.view[:4]) == b"keep"
    assert segment.fd >= 0
    del held
    pool.trim(1000)
    assert segment.fd < 0
    other = pool.acquire(1 << 20)
    idle = other.segment
    del other
    pool.retire(idle)
    assert idle.fd < 0


def test_trim_frees_unused_segments():
    pool = Pool()
    held, idle = pool.acquire(20 << 20), pool.acquire(40 << 20)
    gone = idle.segment.number
    del idle
    assert pool.trim(1000) == []
    assert pool.trim(-1) == [gone]
    assert pool.nbytes == held.segment.nbytes
    assert pool.acquire(40 << 20).segment.number not in (gone, held.segment.number)


def test_pool_leaves_a_reserve_of_memory(monkeypatch):
    pool = Pool(shared=False)
    kept = pool.acquire(1 << 20)
    monkeypatch.setattr(buffers, "available_memory", lambda: pool._reserve + (1 << 20))
    with pytest.raises(OutOfMemory, match="this machine is low on memory"):
        pool.acquire(2 << 20)
    pool.acquire(1 << 20)  # free blocks can still be used
    del kept
    with pytest.raises(MemoryError):
        pool.acquire(1 << 40)
    assert pool.nbytes <= SLAB


def test_pool_does_not_grow_beyond_its_limit():
    pool = Pool(shared=False, limit=lambda: 10 << 20)
    held = [pool.acquire(3 << 20) for _ in range(4)]
    with pytest.raises(OutOfMemory, match="all of the 10485760 bytes that it may take"):
        pool.acquire(3 << 20)
    del held[:2]
    held.append(pool.acquire(3 << 20))  # a free block
    held.append(pool.acquire(3 << 20))
    with pytest.raises(OutOfMemory):
        pool.acquire(1 << 20)
    held.clear()
    pool.acquire(1 << 20)  # frees blocks of another size
    assert pool.nbytes <= 10 << 20


def test_failed_mapping_closes_its_file(monkeypatch):
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(buffers.mmap, "mmap", lambda *a, **k: (_ for _ in ()).throw(OSError(12)))
    with pytest.raises(OSError, match="12"):
        Segment(1, 4096, shared=True)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_view_waits_for_a_running_copy():
    pool = Pool(shared=False)
    lease = pool.acquire(4)
    calls = []

    def arrive():
        calls.append(1)
        lease.writable[:] = b"here"

    lease.fill_later(arrive)
    assert not calls
    assert bytes(view_of(lease)) == b"here"
    assert bytes(lease.view) == b"here"
    assert calls == [1]


def test_view_of_bytes():
    assert bytes(view_of(b"abc")) == b"abc"
    assert bytes(view_of(memoryview(b"abc"))) == b"abc"
    assert view_of(b"").nbytes == view_of(memoryview(b"")).nbytes == 0


def test_size_of_a_segment_is_sealed():
    segment = Segment(1, 8192, shared=True)
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:tensortap")
    segment.close()
    assert segment.fd == -1
    segment.close()


def mapped(lease):
    return MappedSegment(os.getpid(), lease.segment.fd, lease.segment.nbytes)


def test_another_process_reads_a_segment():
    pool = Pool()
    lease = pool.acquire(100_000)
    lease.writable[:] = bytes(range(250)) * 400
    code = f"""
import sys; sys.path.insert(0, {SOURCE!r})
from tensortap.buffers import MappedSegment
seen = MappedSegment({os.getpid()}, {lease.segment.fd}, {lease.segment.nbytes})
sys.stdout.buffer.write(seen.memory[{lease.offset}:{lease.offset + 100_000}])
try: seen.memory[0] = 1
except TypeError: sys.stderr.write("read only")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
    assert done.stdout == bytes(lease.view)
    assert done.stderr == b"read only"


def test_mapping_outlives_its_segment():
    pool = Pool()
    lease = pool.acquire(1 << 20)
    lease.writable[:5] = b"still"
    seen = mapped(lease)
    segment = lease.segment
    del lease
    pool.retire(segment)
    assert segment.fd < 0
    assert seen.memory[:5] == b"still"


@pytest.mark.parametrize("nbytes", [4096, 16384, 0, -1])
def test_mapping_checks_the_size(nbytes):
    segment = Segment(1, 8192, shared=True)
    with pytest.raises((OSError, ValueError)):
        MappedSegment(os.getpid(), segment.fd, nbytes)
    segment.close()


def test_maps_only_sealed_tensortap_segments(tmp_path):
    loose = os.memfd_create("tensortap", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    with pytest.raises(OSError, match="not sealed"):
        MappedSegment(os.getpid(), loose, 4096)
    fcntl.fcntl(loose, 1033, 0x2)
    with pytest.raises(OSError, match="not sealed"):
        MappedSegment(os.getpid(), loose, 4096)
    file = os.open(tmp_path / "f", os.O_CREAT | os.O_RDWR)
    with pytest.raises(OSError, match="is not a tensortap segment"):
        MappedSegment(os.getpid(), file, 4096)
    with pytest.raises(OSError, match="No such file"):
        MappedSegment(os.getpid(), 9999, 4096)
    os.close(loose)
    os.close(file)


def test_remote_block_reports_when_it_is_freed_and_can_be_copied():
    pool, home = Pool(), Pool(shared=False)
    lease = pool.acquire(1 << 20)
    lease.writable[:] = b"a" * (1 << 20)
    seen = mapped(lease)
    freed = collections.deque()
    one = RemoteBlock(seen, 7, lease.offset, 1000, freed)
    two = RemoteBlock(seen, 7, lease.offset + 4096, 500, freed)
    assert seen.used == 1500
    assert bytes(one.view) == b"a" * 1000
    one.copy_to(home)
    lease.writable[:1000] = b"b" * 1000
    assert bytes(one.view) == b"a" * 1000
    assert bytes(two.view) == b"a" * 500
    del two
    assert list(freed) == [(7, lease.offset + 4096)]
    assert seen.used == (1000 if one in seen.blocks else 0)
    del one
    gc.collect()
    assert list(freed) == [(7, lease.offset + 4096), (7, lease.offset)]
    assert seen.used == 0


def test_forked_child_does_not_write_into_memory_of_its_parent():
    """Segments are shared with a forked child, which has to allocate its own."""
    code = f"""
import sys; sys.path.insert(0, {SOURCE!r})
import os, numpy
from tensortap.pipeline.pipeline import pipeline
mine = pipeline.pool.acquire(100_000)
mine.writable[:] = b"p" * 100_000
where = mine.address
child = os.fork()
if child == 0:
    del mine
    for _ in range(10):
        lease = pipeline.pool.acquire(100_000)
        lease.writable[:] = b"c" * 100_000
    os._exit(0 if lease.address != where else 3)
assert os.waitpid(child, 0)[1] == 0
assert bytes(mine.view) == b"p" * 100_000
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
