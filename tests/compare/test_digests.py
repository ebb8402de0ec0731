"""Runs that kept digests instead of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap.capture.queue import Queue
from tensortap.capture.ticket import Ticket
from tensortap.core.record import Kind, Record
from tensortap.rooms.track.shard_digest import shard_digest
from tensortap.runs.folders import end_run, make_run
from tensortap.runs.sink import StoreSink


@pytest.fixture
def store(tmp_path):
    """Return a function that writes the records of all ranks into a new run."""

    def write(*by_rank):
        run = make_run(tmp_path / "runs", 1)
        for rank, records in enumerate(by_rank):
            sink = Queue(StoreSink(run, rank), budget=1 << 30, overflow="newest", name="test")
            for record in records:
                sink.write(record, Ticket(1), 0)
            sink.close()
        end_run(run)
        return run

    return write


def trained(exchange):
    """Return the records of two steps; perhaps two weights are exchanged before the second."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    with tap.track(model, optimizer, digests=True) as tracker:
        for step in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            if exchange and step == 1:
                with torch.no_grad():
                    flat = model[2].weight.view(-1)
                    flat[[3, 5]] = flat[[5, 3]]
            optimizer.zero_grad()
            tracker.step()
    return tracker.records


@pytest.mark.slow
def test_digests_show_what_statistics_do_not(store):
    runs = [store(trained(exchange)) for exchange in (False, False, True)]
    report = tap.compare(*runs[:2], atol=0, rtol=0)
    assert report
    assert report.compared > 30
    chosen = {"names": r"^2\.weight$", "kinds": ["Weight"]}
    assert tap.compare(runs[0], runs[2], **chosen)  # within the tolerance, as statistics tell
    report = tap.compare(runs[0], runs[2], atol=0, rtol=0, **chosen)
    assert not report
    assert report.first.key.step == 1
    assert "the bits differ, by digest" in str(report)


def test_digests_of_shards_are_put_together(store):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)

    def record(part, rank, ranks, start):
        shard = tap.core.record.Shard(x.shape, (0, start), ("S(1)",))
        return Record(
            "x", Kind.WEIGHT, 0, 0, 0, rank, ranks, 0, "", "float32", part.shape, shard,
            shard_digest(part, shard), None, tap.viz.summarize(part),
        )  # fmt: skip

    wrong = x[:, 2:].copy()
    wrong[1, [0, 1]] = wrong[1, [1, 0]]
    one = store([record(x, 0, 1, 0)])
    two, bad = (
        store([record(x[:, :2], 0, 2, 0)], [record(part, 1, 2, 2)]) for part in (x[:, 2:], wrong)
    )
    assert tap.compare(one, two, atol=0, rtol=0)
    assert not tap.compare(one, bad, atol=0, rtol=0)
    assert tap.compare(one, bad)


@pytest.mark.slow
def test_states_of_jax_have_digests():
    import jax.numpy as jnp

    params = {"w": jnp.arange(6.0)}
    with tap.track(params, digests=True) as tracker:
        tracker.step(params)
    records = [record for record in tracker.records if record.kind is Kind.WEIGHT]
    expected = shard_digest(np.arange(6, dtype=np.float32))
    assert [(record.step, record.digest) for record in records] == [(-1, expected), (0, expected)]
    assert "tensors and digests see states only" in tracker.unseen["inside compiled functions"]
