"""Blocks of the arena are lent to a server; those that found no room in it wait for some."""

from __future__ import annotations

import pytest

from tensortap.core.buffers import Pool
from tensortap.live.sink import Lender


@pytest.fixture
def pool():
    pool = Pool(1 << 20)
    pool.prepare()
    return pool


@pytest.fixture
def lender(pool):
    lender = Lender(pool, wanted=True)
    lender.open(lender._nonce)
    return lender


def private_block():
    lease = Pool(1 << 20, shared=False).acquire(1 << 19)
    lease.writable[:] = b"x" * (1 << 19)
    return lease


def test_waits_until_the_server_returns_blocks(pool, lender):
    block, lent = private_block(), [pool.acquire_shared(1 << 20)]
    seen = []

    def server_returns_blocks():
        seen.append((pool.arena_is_wanted, pool.acquire(1 << 12).segment.number))
        lent.clear()
        return True

    found = lender.in_place(block, server_returns_blocks)
    assert found.segment.number > 0
    assert bytes(found.view) == bytes(block.view)
    assert seen == [(True, 0)]  # meanwhile new snapshots leave the arena to it
    assert not pool.arena_is_wanted


def test_sends_the_bytes_if_the_server_returns_nothing(pool, lender):
    block, lent = private_block(), pool.acquire_shared(1 << 20)
    assert lender.in_place(block, lambda: False) is block
    assert not pool.arena_is_wanted
    assert lent is not None


def test_does_not_wait_for_more_than_the_arena_has(lender):
    block = Pool(4 << 20, shared=False).acquire(2 << 20)
    assert lender.in_place(block, lambda: pytest.fail("waited")) is block


def test_a_wrong_nonce_rules_out_shared_memory(pool, lender):
    lender.open(bytes(16))
    assert not lender.active
    assert lender.place_body(bytes(1 << 16)) == bytes(1 << 16)
