"""Exports of a run."""

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import tensortap as tap
from tensortap.core.errors import TensortapError

BIG = torch.arange(10_000, dtype=torch.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tap.init(tmp_path_factory.mktemp("runs"))
    for step in range(3):
        tap.step(step)
        tap.catch(BIG + step, "blocks/0")
        tap.catch({"a": np.arange(3), "b": [1.5, torch.ones(2)]}, "tree")
        tap.catch(torch.full((4,), step, dtype=torch.bfloat16), "half")
        tap.catch("a text", "text")
    tap.catch(7.0, "again")
    tap.catch(8.0, "again")
    tap.dump(torch.ones(3), "dumped")
    tap.dump(object, "a class")
    tap.finish()
    return tap.open(path)


COUNT = 3 * 3 + 2 + 1  # neither texts nor classes


def test_npz(run, tmp_path):
    assert run.export(tmp_path / "out.npz") == COUNT
    with np.load(tmp_path / "out.npz") as found:
        assert (found["blocks%2F0@2"] == BIG.numpy() + 2).all()
        assert found["tree@1[a]"].tolist() == [0, 1, 2]
        assert found["tree@1[b][0]"] == 1.5
        assert found["tree@1[b][1]"].tolist() == [1.0, 1.0]
        assert found["half@2"].view(ml_dtypes.bfloat16).tolist() == [2.0] * 4
        assert (found["again@2"], found["again@2.1"]) == (7.0, 8.0)
        assert found["dumped@2"].tolist() == [1.0, 1.0, 1.0]


def test_folder(run, tmp_path):
    assert run.export(tmp_path / "out") == COUNT + 1
    assert (np.load(tmp_path / "out/blocks%2F0@0.npy") == BIG.numpy()).all()
    assert torch.load(tmp_path / "out/dumped.pt").tolist() == [1.0, 1.0, 1.0]
    assert (tmp_path / "out/a class.pkl").exists()
    with pytest.raises(TensortapError, match="not empty"):
        run.export(tmp_path / "out")


def test_parquet(run, tmp_path):
    assert run.export(tmp_path / "out.parquet") == 3 * 4 + 2 + 2
    table = pq.read_table(tmp_path / "out.parquet")
    assert set(table["name"].to_pylist()) == set(run.names())


def test_selected_names(run, tmp_path):
    assert run.export(tmp_path / "out.npz", names="^half$") == 3
    assert run.export(tmp_path / "out.parquet", names="^half$") == 3
    with pytest.raises(TensortapError, match="regular expression"):
        run.export(tmp_path / "other.npz", names="(")


def test_records_of_several_kinds_do_not_collide(tmp_path):
    from tensortap.capture.pipeline import pipeline
    from tensortap.capture.queue import write_to
    from tensortap.core.record import Kind, Record

    path = tap.init(tmp_path / "runs")
    for number, kind in enumerate((Kind.ACTIVATION, Kind.GRADIENT)):
        record = Record("fc", kind, 0, 0, number, 0, 1, 0, value=float(number))
        write_to(pipeline.queues, record, 0)
    tap.finish()
    assert tap.open(path).export(tmp_path / "out.npz") == 2
    with np.load(tmp_path / "out.npz") as found:
        assert {name: float(found[name]) for name in found} == {
            "fc.Activation@0": 0.0,
            "fc.Gradient@0": 1.0,
        }


def test_unknown_suffix(run, tmp_path):
    with pytest.raises(TensortapError, match=r"target must be \.npz"):
        run.export(tmp_path / "out.csv")


def test_never_overwrites(run, tmp_path):
    (tmp_path / "out.npz").write_text("mine")
    with pytest.raises(TensortapError, match="exists"):
        run.export(tmp_path / "out.npz")
    assert (tmp_path / "out.npz").read_text() == "mine"


@pytest.mark.parametrize("name", ["out.npz", "out"])
def test_repeated_steps_are_kept(tmp_path, name):
    path = tap.init(tmp_path / "runs")
    for value in (1.0, 2.0, 3.0):  # as after an interrupted cell
        tap.step(5)
        tap.catch(np.zeros(1), "x")
        tap.step(6)
        tap.catch(np.full(2, value), "x")
    tap.finish()
    target = tmp_path / name
    assert tap.open(path).export(target) == 6
    keys = ("x@6", "x@6~1", "x@6~2")
    if name == "out.npz":
        with np.load(target) as file:
            found = [file[key] for key in keys]
    else:
        found = [np.load(target / f"{key}.npy") for key in keys]
    assert [array.tolist() for array in found] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]


def test_failed_export_leaves_no_file(tmp_path):
    path = tap.init(tmp_path / "runs")
    tap.catch(np.zeros(100_000), "x")
    tap.finish()
    (tensors,) = (path / "tensors").rglob("*.safetensors")
    tensors.unlink()
    with pytest.raises((TensortapError, OSError), match="safetensors"):
        tap.open(path).export(tmp_path / "out.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["runs"]


def test_name_with_a_zero_byte(tmp_path):
    path = tap.init(tmp_path / "runs")
    tap.catch(1.0, "nul\0")
    tap.finish()
    assert tap.open(path).export(tmp_path / "out.npz") == 1
