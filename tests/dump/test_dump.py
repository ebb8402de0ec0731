"""`dump` writes one plain file per object."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch

import tensortap as tap
from tensortap.core.errors import NotFound
from tensortap.rooms.dump import files

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    path = tap.init(tmp_path)
    yield path
    tap.finish()


def test_file_depends_on_type_and_is_written_at_once(run):
    tensor, array = torch.randn(3, 3), np.arange(4)
    assert tap.dump(tensor, "layer1_output") == run / "layer1_output.pt"
    assert tap.dump(array, "array") == run / "array.npy"
    assert tap.dump({"a": [1, (2, 3)]}, "tree") == run / "tree.pkl"
    assert torch.equal(torch.load(run / "layer1_output.pt", weights_only=True), tensor)
    assert (np.load(run / "array.npy") == array).all()
    assert pickle.loads((run / "tree.pkl").read_bytes()) == {"a": [1, (2, 3)]}


def test_repeated_name_gets_a_number(run):
    names = [tap.dump(torch.tensor(i), "x").name for i in range(3)]
    assert names == ["x.pt", "x_0001.pt", "x_0002.pt"]
    tap.flush(60)
    opened = tap.open(run)
    assert [int(v) for v in opened.get_all("x")] == [0, 1, 2]
    assert int(opened.get("x", step=1)) == 1


def test_default_name_is_the_expression(run):
    hidden_state = np.zeros(2)
    assert tap.dump(hidden_state).name == "hidden_state.npy"


def test_disabled_dump_writes_nothing(run, monkeypatch):
    tap.enable(False)
    try:
        assert tap.dump(1, "x") is None
    finally:
        tap.enable()
    assert not (run / "x.pkl").exists()


def test_without_a_run_raises():
    tap.finish()
    with pytest.raises(NotFound, match=r"tap\.init"):
        tap.dump(1, "x")


class Point:
    def __init__(self, x):
        self.x = x


def test_registered_format(run):
    tap.rooms.dump.register_format(
        Point,
        ".point.json",
        lambda point, path: path.write_text(json.dumps(point.x)) and None,
        lambda path: Point(json.loads(path.read_text())),
        lambda a, b: a.x == b.x,
    )
    try:
        assert tap.dump(Point(3), "p").name == "p.point.json"
        tap.flush(60)
        assert tap.open(run).get("p").x == 3
        assert files.format_of(Point(1)).compare(Point(2), Point(2))
    finally:
        files._formats.pop(0)


def test_rejects_invalid_suffix():
    with pytest.raises(ValueError, match="suffix"):
        tap.rooms.dump.register_format(Point, "json", print, print)


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch /tmp/tensortap-was-here",)


@pytest.mark.attack("pickle that runs code")
def test_untrusted_files_run_no_code(run, tmp_path):
    from pathlib import Path

    mark = Path("/tmp/tensortap-was-here")
    mark.unlink(missing_ok=True)
    (run / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(files.UntrustedFile, match=r"evil\.pkl is a pickle.*trust=True"):
        files.load_file(run / "evil.pkl")
    assert not mark.exists()
    torch.save(Evil(), run / "evil.pt")
    with pytest.raises(files.UntrustedFile, match="trust=True"):
        files.load_file(run / "evil.pt")
    assert not mark.exists()
    np.save(run / "evil.npy", np.array([Evil()], object), allow_pickle=True)
    with pytest.raises(files.UntrustedFile, match="trust=True"):
        files.load_file(run / "evil.npy")
    assert not mark.exists()


def test_pickle_needs_trust(run):
    tap.dump(Point(4), "mine")
    tap.flush(60)
    opened = tap.open(run)
    with pytest.raises(files.UntrustedFile, match="trust=True"):
        opened.get("mine")
    assert opened.get("mine", trust=True).x == 4


def test_object_that_cannot_be_saved_is_missing(run, caplog):
    assert tap.dump(lambda: 1, "f") is None
    assert not list(run.glob("*.pkl"))  # nor a draft
    assert "'f' was not" in caplog.text
    tap.dump(1, "g")
    assert tap.flush(60)
    assert tap.open(run).missing() == [("f", 0, 0)]


def test_full_disk_does_not_stop_training(run, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        assert tap.dump(np.ones(3), "full") is None
    assert tap.dump(np.ones(3), "full").name == "full.npy"
    assert tap.flush(60)
    assert tap.open(run).missing() == [("full", 0, 0)]


def test_strict_mode_raises(run, monkeypatch):
    from tensortap.capture.pipeline import pipeline

    monkeypatch.setattr(pipeline, "strict", True)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        tap.dump(lambda: 1, "f")


def test_describe_reads_the_dumped_file(run, capsys):
    tap.dump(torch.arange(6.0).reshape(2, 3), "output")
    tap.dump(Point(1), "own")
    tap.flush(60)
    opened = tap.open(run)
    opened.describe("output")
    assert "[2, 3] f32" in capsys.readouterr().out
    opened.describe("own")  # not read without trust
    assert "trust=True" in capsys.readouterr().out.replace("\n", " ")
