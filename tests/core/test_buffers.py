"""Recycled memory: blocks are reused, and never leased twice."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.core import buffers, limits
from tensortap.core.buffers import MappedSegment, OutOfMemory, Pool, Segment
from tests.processes import in_threads

SOURCE = str(Path(__file__).parents[2] / "src")


def prepared(pool):
    """Return the pool with a complete arena."""
    pool.prepare()
    pool.extend(pool.nbytes)
    return pool


@pytest.mark.parametrize("prepare", [prepared, lambda pool: pool], ids=["arena", "private"])
def test_reuses_a_returned_block(prepare):
    pool = prepare(Pool())
    lease = pool.acquire(100_000)
    where = lease.address
    lease.writable[:] = b"x" * 100_000
    assert bytes(lease.view) == b"x" * 100_000
    del lease
    for _ in range(100):
        assert pool.acquire(100_000).address == where


def test_uses_private_memory_when_the_arena_is_full():
    pool = prepared(Pool(8 << 20))
    leases = [pool.acquire(1 << 20) for _ in range(10)]
    assert [lease.segment.number for lease in leases] == [1] * 8 + [0] * 2
    assert pool.acquire(9 << 20).segment.number == 0  # larger than the arena
    assert pool.acquire_shared(1) is None
    for lease in leases:
        lease.writable[:] = b"x" * (1 << 20)
    del leases[3:5], lease
    merged = pool.acquire_shared(2 << 20)  # two returned neighbors
    assert merged.segment.number == 1
    assert all(set(lease.view[::4096]) == {ord("x")} for lease in leases)


@given(st.lists(st.tuples(st.integers(1, 300_000), st.integers(0, 5)), max_size=40))
@settings(max_examples=25)
def test_leased_blocks_never_overlap(requests):
    pool = Pool(1 << 20, shared=False)
    held = []
    for nbytes, drop in requests:
        held.append(pool.acquire(nbytes))
        assert held[-1].writable.nbytes == nbytes
        if drop < len(held):
            held.pop(drop)
        spans = sorted((lease.address, lease.address + lease.nbytes) for lease in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_many_threads_share_a_pool():
    pool = prepared(Pool(1 << 28, shared=False))
    wrong = []

    def work(mark: int) -> None:
        for _ in range(300):
            leases = [pool.acquire(size) for size in (5000, 70_000, 5000)]
            for lease in leases:
                lease.writable[:] = bytes([mark]) * lease.nbytes
            wrong.extend(lease for lease in leases if set(lease.view[::997]) != {mark})

    in_threads(work, range(6))
    assert not wrong
    assert pool.acquire_shared(1 << 28) is not None, "a block was not returned"


def resident(address: int) -> int:
    """Return the kilobytes of the mapping at an address that are in memory."""
    smaps = Path("/proc/self/smaps").read_text()
    return int(smaps[smaps.index(f"{address:x}-") :].split("Rss:")[1].split()[0])


def test_arena_takes_only_what_is_used(monkeypatch):
    pool = Pool(80 << 20)
    pool.prepare()
    leases = [pool.acquire(1 << 20)]
    where = leases[0].segment.address
    assert resident(where) == pool.taken >> 10 == 16 << 10  # ready at once
    for _ in range(39):
        leases.append(pool.acquire(1 << 20))
        pool.tidy()
    assert all(lease.segment.number == 1 for lease in leases)
    assert resident(where) == pool.taken >> 10 == 56 << 10
    assert pool.acquire_shared(30 << 20) is None
    assert pool.extend(30 << 20)  # up to its size
    assert not pool.extend(30 << 20)
    monkeypatch.setattr(buffers, "_KEPT", 0.0)
    pool.tidy()
    pool.tidy()
    assert resident(where) == 80 << 10  # blocks of it are leased
    leases.clear()
    pool.tidy()
    assert (resident(where), pool.taken) == (0, 0)
    pool.tidy()
    assert pool.acquire(1 << 20).address == where


def test_pinned_arena_stays(monkeypatch):
    monkeypatch.setattr(buffers, "_KEPT", 0.0)
    pool = Pool(80 << 20)
    pool.prepare(whole=True)
    lease = pool.acquire(70 << 20)
    lease.writable[:1] = b"x"
    assert lease.segment.number == 1
    where = lease.address
    del lease
    for _ in range(3):
        pool.tidy()
    assert bytes(pool.acquire(70 << 20).writable[:1]) == b"x"
    assert pool.acquire(70 << 20).address == where


@pytest.mark.parametrize("failing", [23, 25], ids=["populate", "collapse"])
def test_prepares_an_arena_on_an_older_kernel(monkeypatch, failing):
    madvise = buffers.libc.madvise

    class OldKernel:
        mmap = buffers.libc.mmap

        def madvise(self, address, nbytes, advice):
            return -1 if advice == failing else madvise(address, nbytes, advice)

    monkeypatch.setattr(buffers, "libc", OldKernel())
    pool = prepared(Pool(4 << 20))
    lease = pool.acquire(4 << 20)
    assert lease.segment.number == 1
    assert resident(lease.address) == (0 if failing == 23 else 4 << 10)
    lease.writable[:] = b"x" * (4 << 20)
    assert set(mapped(lease).memory[::4096]) == {ord("x")}


def test_releases_private_memory_beside_an_arena(monkeypatch):
    pool = prepared(Pool(4 << 20))
    leases = [pool.acquire(1 << 20) for _ in range(7)]
    assert pool.taken == 7 << 20
    monkeypatch.setattr(buffers, "_KEPT", 0.0)
    pool.tidy()
    assert pool.taken == 7 << 20  # blocks of it are leased
    pool.acquire(1 << 20)
    leases.clear()
    pool.tidy()
    assert pool.taken == 8 << 20  # it was used just now
    pool.tidy()
    assert pool.taken == 0


def test_renewed_pool_never_leases_old_memory_again():
    pool = prepared(Pool())
    held, returned = pool.acquire(1 << 20), pool.acquire(1 << 20)
    held.writable[:4] = b"keep"
    old = held.segment
    del returned
    pool.renew()
    assert all(pool.acquire(1 << 20).segment is not old for _ in range(100))
    assert bytes(held.view[:4]) == b"keep"
    fd = old.fd
    del held, old
    assert not os.path.exists(f"/proc/self/fd/{fd}")


def test_pool_leaves_a_reserve_of_memory(monkeypatch):
    pool = Pool(4 << 20, shared=False)
    kept = pool.acquire(1 << 20)
    free = limits.total_memory() // 20 + (1 << 20)
    monkeypatch.setattr(limits, "available_memory", lambda: free)
    with pytest.raises(OutOfMemory, match="this machine is low on memory"):
        pool.acquire(5 << 20)
    pool.acquire(3 << 20)  # free blocks can still be used
    del kept
    with pytest.raises(MemoryError):
        pool.acquire(1 << 40)


def test_pool_does_not_grow_beyond_its_limit():
    pool = Pool(1 << 20, limit=lambda: 10 << 20)
    held = [pool.acquire(1 << 20), *[pool.acquire(3 << 20) for _ in range(3)]]
    assert pool.taken == 10 << 20
    with pytest.raises(OutOfMemory, match="all of the 10485760 bytes that it may take"):
        pool.acquire(3 << 20)
    del held[:2]
    held.append(pool.acquire(1 << 20))  # in the arena
    held.append(pool.acquire(3 << 20))
    held.clear()
    pool.acquire(20 << 20)  # alone, a value may be larger


def test_failed_mapping_closes_its_file(monkeypatch):
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(buffers.mmap, "mmap", lambda *a, **k: (_ for _ in ()).throw(OSError(12)))
    with pytest.raises(OSError, match="12"):
        Segment(1, 4096, shared=True)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_size_of_a_segment_is_sealed():
    segment = Segment(1, 8192, shared=True)
    for size in (4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:tensortap")


def mapped(lease):
    return MappedSegment(os.getpid(), lease.segment.fd, lease.segment.nbytes)


def test_mapping_outlives_its_segment():
    pool = prepared(Pool())
    lease = pool.acquire(1 << 20)
    lease.writable[:5] = b"still"
    seen = mapped(lease)
    segment = lease.segment
    fd = segment.fd
    del lease, segment
    pool.renew()
    pool.acquire(1)
    assert not os.path.exists(f"/proc/self/fd/{fd}")
    assert seen.memory[:5] == b"still"
