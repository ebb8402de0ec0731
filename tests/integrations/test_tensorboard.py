"""Event files, read back by TensorBoard itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tensortap as tap
from tensortap.core.errors import TensortapError
from tensortap.core.record import Kind, Record
from tensortap.rooms.integrations.tensorboard import export


def read(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


@pytest.mark.slow
def test_scalars(tracked, tmp_path):
    count = tracked.to_tensorboard(tmp_path)
    frame = tracked.stats()
    assert count == len(frame)
    found = read(tmp_path)
    for kind, name, tag in [
        ("Weight", "0.weight", "Weight/{}/0"),
        ("Weight_Gradient", "2.bias", "Weight_Gradient/{}/2.bias"),
        ("Optimiser_State", "0.weight.exp_avg_sq", "Optimiser_State.exp_avg_sq/{}/0"),
        ("Value", "caught", "Value/{}/caught"),
    ]:
        rows = frame[(frame.kind == kind) & (frame.name == name)]
        for statistic in ("rm2", "std", "max_abs", "nans"):
            scalars = found.Scalars(tag.format(statistic))
            assert [s.step for s in scalars] == rows.step.tolist()
            assert rows.step.tolist()[-4:] == [0, 1, 2, 3]
            expected = rows[statistic].astype(np.float32).tolist()  # as TensorBoard stores them
            assert [s.value for s in scalars] == expected


def test_metrics_and_exponents(tracked, tmp_path):
    tracked.to_tensorboard(tmp_path)
    found = read(tmp_path)
    scalars = found.Scalars("loss")
    assert [s.step for s in scalars] == [0, 1, 2, 3]
    records = tracked.reader.records("loss")
    assert [s.wall_time for s in scalars] == [r.time_ns / 1e9 for r in records]
    losses = tracked.metrics()["loss"].astype(np.float32).tolist()
    assert [s.value for s in scalars] == losses
    assert [s.value for s in found.Scalars("half")] == [0, 0.5, 1, 1.5]
    histograms = found.Histograms("Weight/exponents/0")
    records = tracked.reader.records("0.weight", kind=Kind.WEIGHT)
    assert [h.step for h in histograms] == [r.step for r in records]
    for histogram, record in zip(histograms, records, strict=True):
        value = histogram.histogram_value
        counted = dict(zip(value.bucket_limit, value.bucket, strict=True))
        assert {n + 1: c for n, c in record.stats.exponents.items()} == {
            limit: count for limit, count in counted.items() if count
        }
        assert value.num == 32
        assert (value.min, value.max) == (min(counted) - 1, max(counted))
    with pytest.raises(TensortapError, match="already contains events"):
        tracked.to_tensorboard(tmp_path)


def test_tracker_without_a_run(tmp_path):
    model = torch.nn.Linear(3, 2)
    with tap.track(model) as tracker:
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            tracker.step(loss=1.0)
    export(tracker, tmp_path, names="weight|loss")
    found = read(tmp_path)
    assert [each.step for each in found.Scalars("Weight/rm2/weight")] == [-1, 0, 1, 2]
    assert len(found.Scalars("loss")) == 3


def test_one_folder_per_rank(tmp_path):
    records = [
        Record("loss", Kind.METRIC, step, 0, step, rank, 2, 0, value=float(rank))
        for rank in (0, 1)
        for step in range(3)
    ]
    assert export(records, tmp_path) == 6
    assert [s.value for s in read(tmp_path).Scalars("loss")] == [0, 0, 0]
    assert [s.value for s in read(tmp_path / "rank1").Scalars("loss")] == [1, 1, 1]
