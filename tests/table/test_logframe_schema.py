"""LogFrames that were made elsewhere: what is taken, and what is said of what is not."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

import tensortap as tap
from tensortap.errors import SchemaError, TensortapError
from tensortap.runs.object_files import UntrustedFile

pytestmark = pytest.mark.filterwarnings("ignore:The DataFrame has column names of mixed type")


def foreign(**changes) -> pd.DataFrame:
    """As another tool writes it."""
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


def test_a_frame_of_the_schema_passes_and_is_ordered():
    frame = tap.validate_logframe(foreign())
    assert frame["exponent_counts"].columns.tolist() == [-math.inf, -1, 0, math.inf]
    assert frame["exponent_counts"].to_numpy().tolist() == [[0, 1, 3, 5], [0, 2, 4, 0]]
    assert frame["metadata"]["rank"].tolist() == [0, 0]
    pd.testing.assert_frame_equal(tap.validate_logframe(frame), frame)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Activations", "Activation"), ("Gradients", "Gradient"), ("Weights", "Weight"),
        ("Weight_Gradients", "Weight_Gradient"), ("Optimiser_State", "Optimiser_State"),
        ("Optimiser_State.exp_avg_sq", "Optimiser_State.exp_avg_sq"),
        ("Optimizer_States.mu", "Optimiser_State.mu"), ("Optimiser State", "Optimiser_State"),
    ],
)  # fmt: skip
def test_other_spellings_are_understood(theirs, ours):
    frame = tap.validate_logframe(foreign(tensor_type=[theirs, "Weight"]))
    assert frame["metadata"]["tensor_type"].tolist() == [ours, "Weight"]


def test_what_others_leave_open():
    frame = foreign(type=[None, np.nan], dtype=["torch.float32", "torch.float8_e5m2"])
    frame = frame.drop(columns=[("exponent_counts", math.inf), ("exponent_counts", -math.inf)])
    found = tap.validate_logframe(frame)
    assert found["metadata"]["type"].tolist() == ["", ""]
    assert found["metadata"]["dtype"].tolist() == ["float32", "float8_e5m2"]
    assert found["exponent_counts"][math.inf].tolist() == [0, 0]


def test_the_frame_that_was_given_is_not_changed():
    frame = foreign(tensor_type=["Weights", "Weights"])
    before = frame.copy()
    tap.validate_logframe(frame)
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
        (foreign(tensor_type=["Wait", "Weight"]), "no tensor_type is called 'Wait'; there is Act"),
        (foreign(tensor_type=["Weight.x", "Weight"]), "no tensor_type is called 'Weight.x'"),
        (foreign(dtype=["int8", "f"]), "dtype 'int8'.*: ml_dtypes.finfo knows no such float"),
        (foreign(step=[0.5, 1]), r"\('metadata', 'step'\) holds whole numbers; found 0.5"),
        (foreign(step=["a", "b"]), r"\('metadata', 'step'\) holds no numbers: 'a', 'b'"),
        (
            foreign().rename(columns={"std": "name", -1: "x"}),
            r"\('exponent_counts', 'x'\) is no exponent",
        ),
        (
            foreign().rename(columns={-1: "0"}),
            "exponent 0 has two columns",
        ),
        (
            pd.concat([foreign(), foreign()[[("scalar_stats", "std")]]], axis=1),
            "columns that are there twice",
        ),
        (
            foreign().astype({("exponent_counts", 0): float}).replace(3.0, np.nan),
            r"\('exponent_counts', 0\) has 1 empty cells",
        ),
    ],
)
def test_an_error_says_what_is_missing_and_what_was_found(frame, words):
    with pytest.raises(SchemaError, match=words):
        tap.validate_logframe(frame)


def test_a_pickle_is_read_only_if_trusted(tmp_path):
    path = tmp_path / "logs.pkl"
    foreign(tensor_type=["Weights", "Weights"]).to_pickle(path)
    with pytest.raises(UntrustedFile, match=r"may run code when read: say trust=True if it is"):
        tap.read_logframe(path)
    found = tap.read_logframe(path, trust=True)
    assert found["metadata"]["tensor_type"].tolist() == ["Weight", "Weight"]
    pd.Series([1]).to_pickle(path)
    with pytest.raises(SchemaError, match=r"logs.pkl: a LogFrame is a pandas.DataFrame, not a Ser"):
        tap.read_logframe(path, trust=True)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files_of_others(tmp_path, suffix):
    path = tmp_path / f"logs.{suffix}"
    frame = foreign()
    frame.index.name = "row"  # makes a third row of headers
    getattr(frame, f"to_{suffix}")(path)
    found = tap.read_logframe(path)
    assert found["exponent_counts"].to_numpy().tolist() == [[0, 1, 3, 5], [0, 2, 4, 0]]
    assert found["scalar_stats"]["std"].tolist() == [1.0, 2.0]


def test_files_that_are_none(tmp_path):
    path = tmp_path / "logs.csv"
    path.write_text("name,step\nfc,1\n")
    with pytest.raises(SchemaError, match=r"logs.csv: the first row of headers names none of"):
        tap.read_logframe(path)
    path.write_text("")
    with pytest.raises(SchemaError, match=r"found nothing"):
        tap.read_logframe(path)
    without(("metadata", "name")).to_csv(path)
    with pytest.raises(SchemaError, match=r"logs.csv: no column \('metadata', 'name'\)"):
        tap.read_logframe(path)
    with pytest.raises(TensortapError, match=r"read from .parquet, .csv or .pkl"):
        tap.read_logframe(tmp_path / "logs.xlsx")
