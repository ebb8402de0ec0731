"""All ranks of a job share one run folder."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

import tensortap as tap
from tensortap.core.errors import NotFound
from tensortap.runs import folders
from tests.runs.conftest import ROOT

GLOO = """
import os, sys, torch, torch.distributed as dist, tensortap as tap
from tensortap.runs.init import current
early = os.environ["EARLY"] == "1"
if early:
    path = tap.init("runs")  # before there is a process group
dist.init_process_group("gloo")
if not early:
    path = tap.init("runs")
rank = dist.get_rank()
for step in range(5):
    tap.catch(torch.full((5000,), float(10 * step + rank)), "hidden")
    tap.catch(float(rank), "loss")
tap.dump(torch.tensor(rank), "out")
tap.dump(torch.tensor(rank), "out")
if not rank:
    current().keepers[0].update_now()  # the end of the run would wait only three seconds
dist.barrier()
dist.destroy_process_group()
print(path)
"""


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("early", ["0", "1"], ids=["after the group", "before the group"])
def test_gloo_processes_share_one_folder(tmp_path, early, forks):
    program = tmp_path / "train.py"
    program.write_text(GLOO)
    env = dict(
        os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), EARLY=early,
        PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1",
    )  # fmt: skip
    codes = forks(program, env, world=2)
    outputs = [[Path(f"{program}.{kind}{rank}").read_text() for kind in "oe"] for rank in range(2)]
    assert codes == [0] * 2, outputs
    paths = {out.strip() for out, _ in outputs}
    assert len(paths) == 1
    (name,) = paths
    run = tap.open(tmp_path / name)
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [run.path.name]
    assert run.reader.ranks == [0, 1]
    assert run.reader.info.world_size == 2
    # rank 0 writes provenance; the other files at the top are dumps
    files = {p.name for p in run.path.iterdir() if p.is_file()}
    dumps = {f"out{n}_rank{r}.pt" for n in ("", "_0001") for r in range(2)}
    assert dumps <= files
    others = files - dumps
    assert {"run.json", "runtime_info.json", "packages.json", "git_info.json"} <= others
    # a name and step that several ranks have
    with pytest.raises(NotFound, match=r"ranks 0 and 1: pass rank=0 or rank='all'"):
        run.get("hidden", step=3)
    assert (run.get("hidden", step=3, rank=1) == 31).all()
    both = run.get("hidden", step=3, rank="all")
    assert {rank: value[0].item() for rank, value in both.items()} == {
        rank: 30.0 + rank for rank in range(2)
    }
    assert {r: int(v) for r, v in run.get("out", rank="all").items()} == {r: r for r in range(2)}
    assert run.get("loss", rank=1) == 1.0


def test_ranks_agree_through_a_shared_folder(tmp_path):
    """Two jobs at once, each of three ranks, in any order of arrival."""
    found: dict[tuple[str, int], object] = {}

    def join(job: str, rank: int) -> None:
        found[job, rank] = folders.shared_run(tmp_path, rank, 3, job)

    threads = [
        threading.Thread(target=join, args=(job, rank))
        for rank in (2, 1, 0)
        for job in ("one", "another")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({str(found["one", rank]) for rank in range(3)}) == 1
    assert len({str(found["another", rank]) for rank in range(3)}) == 1
    assert found["one", 0] != found["another", 0]


@pytest.mark.slow
def test_ignores_answer_to_an_older_job(tmp_path):
    first = [None, None]

    def join(into: list, rank: int) -> None:
        into[rank] = folders.shared_run(tmp_path, rank, 2, "the same job name")

    for into in (first, second := [None, None]):
        # rank 1 comes long before rank 0, which is when a stale answer would be taken
        late = threading.Thread(target=join, args=(into, 1))
        late.start()
        late.join(0.3)
        assert late.is_alive()
        join(into, 0)
        late.join(60)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] != second[0]


def test_rank_without_answer_warns_and_creates_its_own_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folders, "_REQUEST_TIMEOUT", 0.2)
    path = folders.shared_run(tmp_path, 1, 2, "job")
    assert (path / "run.json").exists()
    assert "rank 0 did not name the run" in caplog.text
