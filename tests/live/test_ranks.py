"""Ranks of one job under one name are histories of their own."""

from __future__ import annotations

import pytest

from tensortap.api.lookup import get as fetch
from tensortap.api.open import RemoteSession
from tensortap.core.errors import NotFound

CATCH = """
    import tensortap as tap
    for i in range(3):
        tap.catch([{rank}, i], "loss")
    assert tap.flush(60)
"""


def test_rank_from_the_launcher(server, run):
    programs = [run(CATCH.format(rank=rank), RANK=str(rank), WORLD_SIZE="2") for rank in (0, 1)]
    for program in programs:
        program.end()
    with pytest.raises(NotFound, match="'loss' is on ranks 0 and 1: pass rank=0"):
        fetch(server.history, "loss")
    assert fetch(server.history, "loss", rank=1) == [1, 2]
    assert fetch(server.history, "loss", 2, rank=0) == [0, 0]
    assert fetch(server.history, "loss", step=1, rank="all") == {0: [0, 1], 1: [1, 1]}
    assert fetch(server.history, "loss", rank="all") == {0: [0, 2], 1: [1, 2]}
    with pytest.raises(NotFound, match="no 'loss' on rank 2; it is on ranks 0 and 1"):
        fetch(server.history, "loss", rank=2)
    assert {r.world_size for r in server.history.records("loss")} == {2}
    held = {r.rank: n for n, r in server.history.latest()}
    assert held == {0: 3, 1: 3}
    with RemoteSession(str(server.address)) as view:
        assert view.get("loss", rank=1) == [1, 2]
        assert view.get("loss", rank="all") == {0: [0, 2], 1: [1, 2]}
        assert sorted((c.rank, c.world_size) for c in view.overview().clients) == [(0, 2), (1, 2)]
