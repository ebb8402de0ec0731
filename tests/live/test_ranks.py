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


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ],
    ids=["torchrun", "slurm", "jax", "mpi"],
)
def test_rank_from_the_launcher(server, run, names):
    programs = [
        run(CATCH.format(rank=rank), **{names[0]: str(rank), names[1]: "2"}) for rank in (0, 1)
    ]
    for program in programs:
        program.end()
    check_two_histories(server)


def check_two_histories(server):
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


def test_rank_from_torch_distributed(server, run, tmp_path):
    code = """
        import torch, torch.distributed as dist, tensortap as tap
        tap.catch("before", "early")
        dist.init_process_group("gloo", init_method="file://{file}", rank={rank}, world_size=2)
        x = torch.full((3,), float({rank}))
        dist.all_reduce(x)
        for i in range(3):
            tap.catch([{rank}, i], "loss")
        tap.catch(x, "reduced")
        assert tap.flush(60)
        dist.barrier()
        dist.destroy_process_group()
    """
    file = tmp_path / "rendezvous"
    # what the launcher says does not count: torch itself knows better
    programs = [run(code.format(file=file, rank=rank), RANK="7", WORLD_SIZE="9") for rank in (0, 1)]
    for program in programs:
        program.end()
    assert {(r.rank, r.world_size) for r in server.history.records("early")} == {(7, 9)}
    both = fetch(server.history, "reduced", rank="all")
    assert [x.tolist() for x in both.values()] == [[1.0] * 3] * 2
    held = {r.rank: n for n, r in server.history.latest() if r.name == "loss"}
    assert held == {0: 3, 1: 3}
    assert fetch(server.history, "loss", step=1, rank="all") == {0: [0, 1], 1: [1, 1]}
