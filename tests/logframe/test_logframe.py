"""Frames of records in memory and of runs, against counts made by hand."""

from __future__ import annotations

import math
import sys

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch

import tensortap as tap
from tensortap.capture.queue import Queue
from tensortap.capture.ticket import Ticket
from tensortap.core.errors import MissingExtra
from tensortap.core.record import Items, Kind, Mapping, Record, TensorData
from tensortap.rooms import figures as viz
from tensortap.rooms.logframe.frame import logframe_of
from tensortap.runs import rows as run_rows
from tensortap.runs.folders import make_run
from tensortap.runs.sink import StoreSink
from tensortap.stats import summarize_array
from tensortap.table.frames import metrics_of

pytestmark = pytest.mark.filterwarnings("ignore:The DataFrame has column names of mixed type")


def record(seq, values, name="fc", kind=Kind.ACTIVATION, dtype="float32", **fields) -> Record:
    array = np.asarray(values).astype(np.dtype(dtype))
    fields = {"step": seq, "call": 0, "rank": 0, "world_size": 1, "time_ns": seq, **fields}
    return Record(
        name, kind, seq=seq, dtype=dtype, shape=array.shape, stats=summarize_array(array), **fields
    )


def kept(path, records) -> tap.console.run.Run:
    """Return a run with the given records."""
    folder = make_run(path, 1)
    ranks = {r.rank for r in records}
    for rank in ranks:
        sink = Queue(StoreSink(folder, rank), budget=1 << 28, overflow="newest", name="test")
        for each in records:
            if each.rank == rank:
                sink.write(each, Ticket(1, sink.hurry), 1000)
        assert sink.flush(60)
        sink.close(60)
    return tap.open(folder)


ONE = [0.0, 0.25, -1.0, 1.5, 3.0, math.nan, math.inf, -math.inf, 2.0**-20, 2.0**20]


def test_counts_every_value_once():
    frame = logframe_of([record(3, ONE)], exponents=(-2, 1))
    assert frame["exponent_counts"].columns.tolist() == [-math.inf, -2, -1, 0, 1, math.inf]
    # the tiny value is below the range, the huge one and both infinities are above
    assert frame["exponent_counts"].iloc[0].tolist() == [1, 1, 0, 2, 1, 3]
    scalars = frame["scalar_stats"].iloc[0]
    assert (scalars["zeros"], scalars["nans"], scalars["count"]) == (1, 1, 10)
    counted = frame["exponent_counts"].sum(axis=1) + scalars["zeros"] + scalars["nans"]
    assert counted.tolist() == [10]


def test_default_range_is_what_occurs():
    frame = logframe_of([record(0, [0.5]), record(1, [16.0]), record(2, [0.0])])
    assert frame["exponent_counts"].columns.tolist() == [-math.inf, *range(-1, 5), math.inf]
    assert frame["exponent_counts"].sum(axis=1).tolist() == [1, 1, 0]
    assert frame["exponent_counts"][4].tolist() == [0, 1, 0]


def test_metadata_follows_the_schema():
    records = [
        record(0, [1.0], "blocks.0.wq", type="torch.nn.Linear"),
        record(1, [1.0], "blocks.0.wq", Kind.GRADIENT),
        record(2, [1.0], "blocks.0.wq.weight", Kind.WEIGHT, "bfloat16"),
        record(3, [1.0], "blocks.0.wq.bias", Kind.WEIGHT),
        record(4, [1.0], "blocks.0.wq.weight", Kind.WEIGHT_GRADIENT),
        record(5, [1.0], "blocks.0.wq.weight", Kind.OPTIMISER_STATE, tags={"state": "exp_avg"}),
        record(6, [1.0], "weight", Kind.WEIGHT),
        record(7, [1.0], "blocks.weight", call=2),  # a module of that name keeps it
    ]
    frame = logframe_of(records)
    found = frame["metadata"]
    assert list(frame.columns.levels[0]) == sorted(("metadata", "scalar_stats", "exponent_counts"))
    assert found.columns.tolist() == [
        "name", "type", "tensor_type", "step", "dtype", "rank", "call",
    ]  # fmt: skip
    assert found["name"].tolist() == [
        *["blocks.0.wq"] * 3, "blocks.0.wq.bias", *["blocks.0.wq"] * 2, "weight", "blocks.weight",
    ]  # fmt: skip
    assert found["tensor_type"].tolist() == [
        "Activation", "Gradient", "Weight", "Weight", "Weight_Gradient",
        "Optimiser_State.exp_avg", "Weight", "Activation",
    ]  # fmt: skip
    assert found["type"].tolist() == ["torch.nn.Linear"] + [""] * 7
    assert found["call"].tolist() == [0] * 7 + [2]
    assert [ml_dtypes.finfo(d).bits for d in found["dtype"]][:3] == [32, 32, 16]
    assert frame.metadata.name.nunique() == 4  # as notebooks write it


def test_leaves_out_integers_metrics_and_recomputed_tensors():
    records = [
        record(0, [1.0]),
        record(1, [1.0], tags={"recompute": "1"}),
        record(2, [1, 2], "ids", dtype="int64"),
        record(3, [True], "mask", dtype="bool"),
        record(4, [3], "ids", dtype="int64"),
        Record("loss", Kind.METRIC, 5, 0, 5, 0, 1, 5, value=0.5),
        Record("x", Kind.VALUE, 6, 0, 6, 0, 1, 6, value="text"),
        Record("fc.norm", Kind.HEALTH, 7, 0, 7, 0, 1, 7, value=0.5, tags={
            "of": "nothing", "kind": "Weight", "quantity": "norm",
        }),
    ]  # fmt: skip
    frame = logframe_of(records)
    assert frame["metadata"]["name"].tolist() == ["fc"]
    assert frame.attrs["left_out"] == {"int64": 2, "bool": 1, "norm": 1}


def test_adds_the_numbers_of_a_stash_function():
    tensor = TensorData("numpy", "float32", (1,), b"\0\0\0\0")
    records = [
        record(0, [1.0], value=Mapping((("kurtosis", 2.5), ("std", 7), ("text", "no")))),
        record(1, [1.0]),
        record(2, [1.0], value=tensor),
        record(3, [1.0], value=Mapping((("value", tensor), ("sparse", True)))),
    ]
    scalars = logframe_of(records)["scalar_stats"]
    assert scalars["kurtosis"].tolist()[0] == 2.5
    assert scalars["kurtosis"].isna().tolist() == [False, True, True, True]
    assert scalars["stash.std"].tolist()[0] == 7
    assert scalars["std"].tolist() == [0.0] * 4
    assert scalars["sparse"].tolist()[3] == 1
    assert list(scalars.columns) == [*run_rows.STATISTICS, "kurtosis", "stash.std", "sparse"]


@pytest.mark.parametrize("as_list", [list, np.array, torch.tensor])
def test_stash_in_the_shape_of_track_and_visualize(tmp_path, as_list):
    def stash(tensor):
        bins, hist = [*range(-17, 18)], [0] * 35
        for value in tensor.flatten().tolist():
            hist[min(max(math.frexp(value)[1], -17), 17) + 17] += 1
        scalars = {"std": tensor.std().item(), "kurtosis": 2.5}
        return {"scalar_stats": scalars, "exp_hist": {"hist": as_list(hist), "bins": as_list(bins)}}

    model = torch.nn.Linear(4, 4)
    weight = stash(model.weight.detach())
    with tap.track(model, stash=stash, kind="weight", include="weight", to=tmp_path) as tracker:
        tracker.step()
    for frame in (tracker.logframe(), tap.open(tracker.path).logframe(strict=True)):
        assert frame["exponent_counts"].columns.tolist() == [-math.inf, *range(-16, 17), math.inf]
        assert frame["exponent_counts"].iloc[-1].tolist() == list(weight["exp_hist"]["hist"])
        assert frame["scalar_stats"]["std"].iloc[-1] == weight["scalar_stats"]["std"]
        assert frame["scalar_stats"]["kurtosis"].iloc[-1] == 2.5
        assert not any("." in str(name) for name in frame["scalar_stats"])
        assert viz.exp_hist(df=frame, tt="Weight").data
    assert tracker.logframe((-2, 2))["exponent_counts"].iloc[-1].sum() == 16


def test_rows_without_a_stash_keep_their_counts():
    bins, hist = (Items("list", each) for each in ((-3, -2, 9, 10), (1, 2, 3, 4)))
    given = Mapping((("exp_hist.hist", hist), ("exp_hist.bins", bins)))
    records = [record(0, [1.0, np.inf]), record(1, [1.0], value=given)]
    counts = logframe_of(records)["exponent_counts"]
    assert counts.columns.tolist() == [-math.inf, *range(-2, 10), math.inf]
    assert counts.iloc[0].tolist() == [0, 0, 0, 1, *[0] * 9, 1]
    assert counts.iloc[1].tolist() == [1, 2, *[0] * 10, 3, 4]


def test_sorts_rows_by_order_of_capture():
    rng = np.random.default_rng(0)
    records = [
        record(i, 2.0 ** rng.integers(-9, 9, 5), f"l{i % 3}", step=i // 6, rank=i % 2)
        for i in range(60)
    ]
    shuffled = [records[i] for i in rng.permutation(60)]
    pd.testing.assert_frame_equal(logframe_of(shuffled), logframe_of(records))
    for row, each in zip(logframe_of(shuffled).itertuples(index=False), records, strict=True):
        assert (row[0], row[3], row[5]) == (each.name, each.step, each.rank)
        assert list(row[7 + len(run_rows.STATISTICS) + 1 : -1]) == [
            each.stats.exponents.get(n, 0) for n in range(-9, 9)
        ]


def test_empty_frame_follows_the_schema():
    frame = logframe_of([])
    assert len(frame) == 0
    assert frame["exponent_counts"].columns.tolist() == [-math.inf, 0, math.inf]
    tap.viz.validate_logframe(frame)


@pytest.mark.parametrize("wrong", [(3, 1), 5, ("a", "b"), (1, 2, 3)])
def test_rejects_an_invalid_range(wrong):
    with pytest.raises(ValueError, match="exponents"):
        logframe_of([], exponents=wrong)


def test_run_and_records_give_the_same_frame(tmp_path):
    records = [
        record(i, [2.0**i, 0.1], f"l{i}", rank=i % 2, value=Mapping((("extra", i),)))
        for i in range(9)
    ]
    run = kept(tmp_path, records)
    pd.testing.assert_frame_equal(run.logframe(), logframe_of(records))
    assert run.logframe(exponents=(-16, 16))["exponent_counts"].shape == (9, 35)


def test_computes_missing_statistics(tmp_path):
    array = np.array([1.0, 0.0, 6.0], "float32")
    whole = TensorData("numpy", "float32", (3,), array.tobytes())
    records = [
        record(0, [1.0]),
        Record("x", Kind.VALUE, 1, 0, 1, 0, 1, 1, "", "float32", (3,), value=whole),
        Record("t", Kind.VALUE, 1, 0, 2, 0, 1, 1, "", "<U1", (1,),
               value=TensorData("numpy", "<U1", (1,), b"a\0\0\0")),
    ]  # fmt: skip
    run = kept(tmp_path, records)
    frame = run.logframe()
    assert frame["metadata"]["tensor_type"].tolist() == ["Activation", "Value"]
    assert frame["exponent_counts"][2].tolist() == [0, 1]
    assert run.stats()["zeros"].tolist()[:2] == [0, 1]


@pytest.mark.parametrize("suffix", ["parquet", "pkl"])
@pytest.mark.parametrize("index", [True, False])
def test_reads_what_pandas_saved(tmp_path, suffix, index):
    records = [record(i, rng_values(i), name=n) for i, n in enumerate(["NA", "a,b", "nan", "ü"])]
    frame = logframe_of([*records, record(4, [math.inf, math.nan])])
    path = tmp_path / f"frame.{suffix}"
    if suffix == "pkl":
        frame.to_pickle(path)
    else:
        frame.to_parquet(path, index=index)
    again = tap.viz.read_logframe(path, trust=suffix == "pkl")
    pd.testing.assert_frame_equal(again, frame)


def rng_values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(50)


def test_metrics(tmp_path):
    def metric(seq, name, value, step, rank=0, kind=Kind.METRIC):
        return Record(name, kind, step, 0, seq, rank, 2, seq, value=value)

    records = [
        metric(0, "loss", 2.0, 10), metric(1, "lr", 0.1, 10), metric(2, "loss", 1.5, 11),
        metric(3, "loss", 1.4, 11), metric(4, "loss", 9.0, 10, rank=1),
        metric(5, "acc", 3, 11, kind=Kind.VALUE), metric(6, "note", "text", 11),
    ]  # fmt: skip
    expected = pd.DataFrame(
        {"step": [10, 10, 11], "rank": [0, 1, 0], "loss": [2.0, 9.0, 1.4], "lr": [0.1, None, None]}
    )
    expected["lr"] = expected["lr"].astype(float)
    run = kept(tmp_path, records)
    for found in (metrics_of(records), run.metrics()):
        pd.testing.assert_frame_equal(found, expected, check_dtype=False, check_column_type=False)
    assert run.metrics("acc", "loss").columns.tolist() == ["step", "rank", "acc", "loss"]
    assert run.metrics("nothing").empty
    assert metrics_of([]).columns.tolist() == ["step", "rank"]


def test_without_pandas_names_the_extra(tmp_path, monkeypatch):
    run = kept(tmp_path, [record(0, [1.0])])
    monkeypatch.setitem(sys.modules, "pandas", None)
    for ask in (run.logframe, run.metrics, run.stats, lambda: run.formats("float16")):
        with pytest.raises(MissingExtra, match=r"needs pandas: pip install .*pandas"):
            ask()


def test_loops_over_no_rows_in_python(tmp_path):
    """Fifty times the rows must not mean many more function calls."""
    import cProfile
    import pstats

    def calls(folder, count) -> int:
        run = kept(tmp_path / folder, [record(i, [1.0, 2.0**-i]) for i in range(count)])
        run.logframe()
        profile = cProfile.Profile()
        profile.runcall(run.logframe)
        return pstats.Stats(profile).total_calls

    assert calls("many", 5000) < 2 * calls("few", 100)


# -- formats -------------------------------------------------------------------------------


def test_formats_of_a_run(tmp_path):
    small, fits, large = [1e-4, 1e-4, 1.0], [1.0, 2.0], [1000.0, 1.0]
    records = [
        record(0, large, "a", step=1),
        record(1, small, "a", step=2),
        record(2, fits, "a", step=2, rank=1),
        record(3, large, "b.weight", Kind.OPTIMISER_STATE, step=1, tags={"state": "exp_avg"}),
        record(4, [1, 2], "ids", step=2, dtype="int32"),
    ]
    run = kept(tmp_path, records)
    frame = run.formats("float8_e4m3fn")
    assert frame.columns.tolist() == [
        "name", "tensor_type", "step", "values", "underflow", "underflow_at_most", "subnormal",
        "overflow", "overflow_at_most", "shift", "scale", "scaled",
    ]  # fmt: skip
    rows = frame.set_index("name")
    # both ranks of the latest step together
    assert (rows.loc["a", "step"], rows.loc["a", "values"]) == (2, 5)
    assert rows.loc["a", "underflow"] == pytest.approx(2 / 5)
    assert rows.loc["a", "shift"] > 0
    assert rows.loc["a", "scaled"] == 0
    assert rows.loc["b", "overflow"] == 0.5
    assert (rows.loc["b", "shift"], rows.loc["b", "scale"]) == (-2, 0.25)
    assert rows.loc["ids", "values"] == 2
    assert len(run.formats("float16", step="all")) == 4
    assert run.formats("float16", step=1)["name"].tolist() == ["a", "b"]


def test_formats_rejects_unknown_arguments(tmp_path):
    run = kept(tmp_path, [record(3, [1.0])])
    with pytest.raises(tap.core.errors.NotFound, match="no float format is called 'float7'"):
        run.formats("float7")
    with pytest.raises(tap.core.errors.NotFound, match="nothing at step 9; steps go from 3 to 3"):
        run.formats("float16", step=9)
