"""LogFrames of other programs: what is accepted, and what errors say."""

from __future__ import annotations

import math
import os

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tensortap as tap
from tensortap.core.errors import SchemaError, TensortapError, UntrustedFile
from tensortap.core.record import Kind, Record
from tensortap.rooms.logframe.frame import logframe_of
from tensortap.stats import summarize_array

pytestmark = pytest.mark.filterwarnings("ignore:The DataFrame has column names of mixed type")


def foreign(**changes) -> pd.DataFrame:
    """Return a LogFrame as another tool writes it."""
    columns = {
        ("metadata", "name"): ["layers.0.wq", "layers.0.wq"],
        ("metadata", "type"): ["", ""],
        ("metadata", "tensor_type"): ["Activation", "Weight"],
        ("metadata", "step"): [0, 1],
        ("metadata", "dtype"): ["float32", "bfloat16"],
        ("scalar_stats", "std"): [1.0, 2.0],
        ("exponent_counts", -1): [1, 2],
        ("exponent_counts", 0): [3, 4],
        ("exponent_counts", -math.inf): [0, 0],
        ("exponent_counts", math.inf): [5, 0],
    }
    for name, values in changes.items():
        columns["metadata", name] = values
    frame = pd.DataFrame(list(zip(*columns.values(), strict=True)))
    frame.columns = pd.MultiIndex.from_tuples(list(columns))
    return frame


def without(*labels) -> pd.DataFrame:
    frame = foreign()
    return frame[[c for c in frame.columns if c not in labels and c[0] not in labels]]


METADATA = {"name": str, "type": str, "tensor_type": str, "step": int, "dtype": str}


def test_strict_frame_has_only_the_columns_of_the_schema(tmp_path):
    stats = summarize_array(np.array([1.0, 3.0], "float32"))
    records = [
        Record("fc", Kind.ACTIVATION, 7, call, call, rank, 2, 0, dtype="float32", stats=stats)
        for rank in (0, 1) for call in (0, 1)
    ]  # fmt: skip
    frame = logframe_of(records, strict=True)
    # as the other tool checks it: these columns of these types, and nothing else
    assert list(frame["metadata"].columns) == list(METADATA)
    for name, kind in METADATA.items():
        assert all(isinstance(value, kind) for value in frame["metadata"][name].tolist())
    assert set(frame.columns.get_level_values(0)) == {
        "metadata", "scalar_stats", "exponent_counts",
    }  # fmt: skip
    assert all(dtype.kind in "iuf" for dtype in frame["scalar_stats"].dtypes)
    assert all(dtype.kind in "iu" for dtype in frame["exponent_counts"].dtypes)
    assert {-math.inf, math.inf} < set(frame["exponent_counts"].columns)
    frame.to_parquet(tmp_path / "strict.pq")
    plain = tap.viz.validate_logframe(logframe_of(records))
    assert plain["metadata"]["rank"].tolist() == [0, 1, 0, 1]
    for found in (tap.viz.validate_logframe(frame), tap.viz.read_logframe(tmp_path / "strict.pq")):
        pd.testing.assert_frame_equal(found, plain)


def test_accepts_and_orders_a_valid_frame():
    frame = tap.viz.validate_logframe(foreign())
    assert frame["exponent_counts"].columns.tolist() == [-math.inf, -1, 0, math.inf]
    assert frame["exponent_counts"].to_numpy().tolist() == [[0, 1, 3, 5], [0, 2, 4, 0]]
    assert frame["metadata"]["rank"].tolist() == [0, 0]
    pd.testing.assert_frame_equal(tap.viz.validate_logframe(frame), frame)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Activations", "Activation"), ("Gradients", "Gradient"), ("Weights", "Weight"),
        ("Weight_Gradients", "Weight_Gradient"), ("Optimiser_State", "Optimiser_State"),
        ("Optimiser_State.exp_avg_sq", "Optimiser_State.exp_avg_sq"),
        ("Optimizer_States.mu", "Optimiser_State.mu"), ("Optimiser State", "Optimiser_State"),
    ],
)  # fmt: skip
def test_accepts_other_spellings(theirs, ours):
    frame = tap.viz.validate_logframe(foreign(tensor_type=[theirs, "Weight"]))
    assert frame["metadata"]["tensor_type"].tolist() == [ours, "Weight"]


def test_adds_defaults_for_missing_columns():
    frame = foreign(type=[None, np.nan], dtype=["torch.float32", "torch.float8_e5m2"])
    frame = frame.drop(columns=[("exponent_counts", math.inf), ("exponent_counts", -math.inf)])
    found = tap.viz.validate_logframe(frame)
    assert found["metadata"]["type"].tolist() == ["", ""]
    assert found["metadata"]["dtype"].tolist() == ["float32", "float8_e5m2"]
    assert found["exponent_counts"][math.inf].tolist() == [0, 0]


def test_does_not_change_its_argument():
    frame = foreign(tensor_type=["Weights", "Weights"])
    before = frame.copy()
    tap.viz.validate_logframe(frame)
    pd.testing.assert_frame_equal(frame, before)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ({"a": 1}, "a LogFrame is a pandas.DataFrame, not a dict"),
        (pd.DataFrame({"name": [1]}), "has columns of two levels.*found 1 level with 'name'"),
        (without("scalar_stats"), "no columns below 'scalar_stats'; found 'metadata', 'exponent"),
        (
            without(("metadata", "dtype")),
            r"no column \('metadata', 'dtype'\); found 'name', 'type'",
        ),
        (without(("metadata", "type")), "fill type with empty strings"),
        (
            without(("exponent_counts", 0), ("exponent_counts", -1)),
            "no exponent below exponent_counts; found -inf, inf",
        ),
        (foreign(tensor_type=["Wait", "Weight"]), "unknown tensor_type 'Wait'; known are Act"),
        (foreign(tensor_type=["Weight.x", "Weight"]), "unknown tensor_type 'Weight.x'"),
        (foreign(dtype=["int8", "f"]), "ml_dtypes.finfo does not know dtype 'int8'"),
        (foreign(step=[0.5, 1]), r"\('metadata', 'step'\) must hold integers, found 0.5"),
        (foreign(step=["a", "b"]), r"\('metadata', 'step'\) must hold numbers, found 'a', 'b'"),
        (
            foreign().rename(columns={"std": "name", -1: "x"}),
            r"\('exponent_counts', 'x'\) is not an integer, -inf or",
        ),
        (
            foreign().rename(columns={-1: "0"}),
            "exponent 0 has two columns",
        ),
        (
            pd.concat([foreign(), foreign()[[("scalar_stats", "std")]]], axis=1),
            "duplicate columns",
        ),
        (
            foreign().astype({("exponent_counts", 0): float}).replace(3.0, np.nan),
            r"\('exponent_counts', 0\) has 1 empty cells",
        ),
    ],
)
def test_errors_name_what_is_missing_and_what_was_found(frame, words):
    with pytest.raises(SchemaError, match=words):
        tap.viz.validate_logframe(frame)


@pytest.mark.attack("pickle that runs code")
def test_reads_a_pickle_only_if_trusted(tmp_path):
    path = tmp_path / "logs.pkl"
    foreign(tensor_type=["Weights", "Weights"]).to_pickle(path)
    with pytest.raises(UntrustedFile, match=r"may run code when read: pass trust=True if it is"):
        tap.viz.read_logframe(path)
    found = tap.viz.read_logframe(path, trust=True)
    assert found["metadata"]["tensor_type"].tolist() == ["Weight", "Weight"]
    pd.Series([1]).to_pickle(path)
    with pytest.raises(SchemaError, match=r"logs.pkl: a LogFrame is a pandas.DataFrame, not a Ser"):
        tap.viz.read_logframe(path, trust=True)


def test_reads_files_of_other_programs(tmp_path):
    path = tmp_path / "logs.parquet"
    foreign().to_parquet(path)
    found = tap.viz.read_logframe(path)
    assert found["exponent_counts"].to_numpy().tolist() == [[0, 1, 3, 5], [0, 2, 4, 0]]
    assert found["scalar_stats"]["std"].tolist() == [1.0, 2.0]


def test_rejects_other_files(tmp_path):
    path = tmp_path / "logs.parquet"
    without(("metadata", "name")).to_parquet(path)
    with pytest.raises(SchemaError, match=r"logs.parquet: no column \('metadata', 'name'\)"):
        tap.viz.read_logframe(path)
    with pytest.raises(TensortapError, match=r"must be a .parquet or .pkl"):
        tap.viz.read_logframe(tmp_path / "logs.csv")


def hostile_files(folder):
    """Yield files that are no LogFrames, or that take far more memory than their size tells."""
    ones = pa.array(np.ones(3_000_000))
    columns = [f"('metadata', '{n}')" for n in ("name", "type", "tensor_type", "step", "dtype")]
    columns += ["('scalar_stats', 'std')", "('exponent_counts', '0')"]
    pq.write_table(pa.table(dict.fromkeys(columns, ones)), folder / "bomb.parquet")
    yield "bomb.parquet", "KiB become 160 MiB or more"
    pq.write_table(pa.table({"x": ones}), folder / "other.parquet")
    yield "other.parquet", "a LogFrame has columns of two levels"
    good = foreign()
    lists = good.copy()
    lists["scalar_stats", "std"] = [[1.0], [2.0]]
    far = good.copy()
    far["exponent_counts", 10**15] = 1
    large = good.copy()
    large["metadata", "step"] = np.array([0, 2**63], np.uint64)
    for name, frame, words in (
        ("lists.parquet", lists, "must hold numbers"),
        ("far.parquet", far, "no number has the exponent"),
        ("large.parquet", large, "must hold integers of 64 bits"),
    ):
        frame.to_parquet(folder / name)
        yield name, words
    table = pa.Table.from_pandas(good)
    for name, about in {"told.parquet": b'{"columns": 5}', "deep.parquet": b"[" * 100_000}.items():
        pq.write_table(table.replace_schema_metadata({b"pandas": about}), folder / name)
        yield name, "cannot be read"
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), ["x" * (1 << 20)])
    few = {name: ones.slice(0, 10_000) for name in columns} | {columns[0]: text}
    pq.write_table(pa.table(few), folder / "texts.parquet", store_schema=False)
    yield "texts.parquet", "a small file with more than"
    for name, data, words in (
        ("no.parquet", b"garbage", "cannot be read"),
        ("no.pkl", b"garbage", "cannot be unpickled"),
    ):
        (folder / name).write_bytes(data)
        yield name, words
    os.mkfifo(folder / "pipe.parquet")
    yield "pipe.parquet", "is not a regular file"


def test_hostile_files_raise_our_errors(tmp_path):
    for name, words in hostile_files(tmp_path):
        with pytest.raises(tap.TensortapError, match=words) as caught:
            tap.viz.read_logframe(tmp_path / name, trust=name.endswith("pkl"))
        assert name in str(caught.value)
