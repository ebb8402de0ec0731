"""Compare files of every format with each other and with objects."""

from __future__ import annotations

import json
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

import tensortap as tap
from tensortap.core.errors import NotFound, TensortapError
from tensortap.rooms.compare.api import path_of
from tensortap.rooms.dump import files

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(value, name):
    path = pathlib.Path(name)
    if path.suffix == ".safetensors":
        safetensors.save_file({"x": value}, path)
    elif path.suffix == ".npy":
        files._save_numpy(value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
                          if value.dtype == torch.bfloat16 else value.numpy(), path)  # fmt: skip
    elif path.suffix == ".pt":
        torch.save(value, path)
    else:
        files._save_pickle(value, path)
    return path


NAMES = ["one.pt", "one.npy", "one.pkl", "one.safetensors"]


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_across_formats(folder, first, second, dtype):
    x = torch.randn(7, 5).to(dtype)
    y = x.clone()
    y[6, 4] += 1
    (folder / "other").mkdir()
    a, same = write(x, first), write(x, f"other/{second}")
    assert tap.compare(a, same, trust=True)
    assert tap.compare(str(a), x, trust=True)
    assert tap.compare(x, a, trust=True)
    found = tap.compare(a, write(y, f"other/{second}"), trust=True)
    assert not found
    assert (found.parts or [found])[0].worst == (6, 4)  # two dicts of one are still dicts


def test_file_of_many_tensors_is_a_dict(folder):
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    safetensors.save_file(tensors, "many.safetensors", metadata={"format": "pt"})
    torch.save(tensors, "many.pt")
    assert tap.compare("many.safetensors", "many.pt")
    assert tap.compare("many.safetensors", tensors)
    torch.save({"a": torch.ones(3)}, "many.pt")
    found = tap.compare("many.safetensors", "many.pt")
    assert [(part.path, part.reason) for part in found.parts] == [('["b"]', "only a has it")]


def test_text_without_a_file_is_text(folder):
    assert tap.compare("a cat", "a cat")
    assert not tap.compare("a cat", "a dog")
    assert not tap.compare("", None)
    assert path_of("line\nrunner.pt") is None
    assert path_of("x" * 5000) is None
    (folder / "there").write_text("")
    assert path_of("there") == pathlib.Path("there")


def test_bad_files(folder):
    x = np.ones(1000)
    with pytest.raises(NotFound, match=r"no such file: nowhere\.pt"):
        tap.compare("nowhere.pt", x)
    with pytest.raises(NotFound, match="no such file"):
        tap.compare("no/where", "no/where/else")
    (folder / "notes.txt").write_text("hm")
    with pytest.raises(TensortapError, match=r"notes\.txt: unknown suffix.*\.npy"):
        tap.compare("notes.txt", x)
    with pytest.raises(TensortapError, match=r"folder without run\.json"):
        tap.compare(folder, folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "data_offsets": [0, 8]},
        {"dtype": [], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]},
        7,
    ],
)
def test_malformed_safetensors(folder, entry):
    header = json.dumps({"x": entry}).encode()
    pathlib.Path("x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(TensortapError, match=r"x\.safetensors"):
        tap.compare("x.safetensors", np.zeros(2))


def test_unaligned_safetensors(folder):
    header = json.dumps({"x": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}).encode()
    header += b" " * (-len(header) % 8 + 1)
    path = pathlib.Path("x.safetensors")
    path.write_bytes(len(header).to_bytes(8, "little") + header + np.array([1.0, 2.0]).tobytes())
    assert tap.compare(path, np.array([1.0, 2.0]))


class Custom:
    def __init__(self, x):
        self.x = x


@pytest.mark.attack("pickle that runs code")
def test_pickles_need_trust(folder):
    import pickle

    for name, x in (("a.pkl", 1.0), ("b.pkl", 2.0)):
        Custom.__module__ = "tests.compare.test_files"
        sys.modules["tests.compare.test_files"] = sys.modules[__name__]
        pathlib.Path(name).write_bytes(pickle.dumps(Custom(x)))
    with pytest.raises(TensortapError, match="trust=True"):
        tap.compare("a.pkl", "b.pkl")
    assert tap.compare("a.pkl", "a.pkl", trust=True)
    found = tap.compare("a.pkl", "b.pkl", trust=True)
    assert found.parts[0].path == ".x"


def test_registered_formats(folder):
    class Note:
        def __init__(self, text):
            self.text = text

    tap.rooms.dump.register_format(
        Note, ".note", lambda note, path: path.write_text(note.text),
        lambda path: Note(path.read_text()), lambda a, b: a.text.lower() == b.text.lower(),
    )  # fmt: skip
    try:
        pathlib.Path("a.note").write_text("Hello")
        assert tap.compare("a.note", Note("hELLO"))
        assert not tap.compare("a.note", Note("bye"))
    finally:
        files._formats.pop(0)


def test_array_that_cannot_be_mapped(folder):
    np.save("empty.npy", np.empty((0, 3)))
    assert tap.compare("empty.npy", np.empty((0, 3)))
    np.save("objects.npy", np.array([1, "x"], object), allow_pickle=True)
    with pytest.raises(TensortapError, match="trust=True"):
        tap.compare("objects.npy", "objects.npy")
    assert tap.compare("objects.npy", "objects.npy", trust=True)
    torch.save(torch.ones(3), "old.pt", _use_new_zipfile_serialization=False)
    assert tap.compare("old.pt", np.ones(3))


def test_rejects_runs_mixed_with_values(folder):
    run = folder / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with pytest.raises(TensortapError, match="only be compared with a run, got a int"):
        tap.compare(run, 5)
    with pytest.raises(TypeError, match="allow_missing"):
        tap.compare(1, 1, allow_missing=True)
